"""`EncoderRunner`: groups multimodal items by modality and sends each group the fastest way.

For authors of engines: the hot path is :meth:`EncoderRunner.execute_mm_encoder`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch

from mmgraph.errors import ConfigError, MMGraphError
from mmgraph.protocol import SupportsMultiModal

__all__ = ["EncoderManager", "EncoderRunner", "ModalityTiming", "batch_items"]

Item = Mapping[str, Any]
"""The fields of one image, video or clip. Every tensor has a leading dimension of rows or items:
patches (T, P) with a grid (1, 3) or (3,), or pixels (1, C, H, W)."""


@runtime_checkable
class EncoderManager(Protocol):
    """What the runner asks of a manager; ``EncoderCudaGraphManager`` is one."""

    def is_captured(self) -> bool: ...

    def supports_modality(self, modality: str) -> bool: ...

    def capture(self, graph_pool: Any | None = None) -> int: ...

    def clear(self) -> None: ...

    def execute(self, mm_kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class ModalityTiming:
    """Time spent on a modality.

    Attributes:
        groups: Groups that were encoded.
        items: Items in them.
        total_ms: Milliseconds, on the device where there is one.
    """

    groups: int
    items: int
    total_ms: float


class EncoderRunner:
    """Encodes lists of multimodal items.

    Args:
        model: Encodes a batch of items of one modality in eager mode.
        manager: Serves batches from graphs; ``None`` for eager mode only.
        device: Device to time on; needed only with `timing`.
        timing: Keep the time spent on each modality.
    """

    def __init__(
        self,
        model: SupportsMultiModal,
        manager: EncoderManager | None = None,
        *,
        device: torch.device | None = None,
        timing: bool = False,
    ) -> None:
        self.model = model
        self.manager = manager
        self._clock = _Clock(device or torch.device("cpu")) if timing else None

    def has_cudagraph(self) -> bool:
        """Whether groups may be replayed now."""
        return self.manager is not None and self.manager.is_captured()

    def capture(self, graph_pool: Any | None = None) -> int:
        """Capture up front; return bytes used, 0 without a manager."""
        return 0 if self.manager is None else self.manager.capture(graph_pool)

    def clear(self) -> None:
        """Free the manager's graphs."""
        if self.manager is not None:
            self.manager.clear()

    @torch.no_grad()
    def execute_mm_encoder(self, mm_kwargs: Sequence[tuple[str, Item]]) -> list[torch.Tensor]:
        """Encode (modality, item) pairs.

        Args:
            mm_kwargs: The items, of any modalities in any order.

        Returns:
            One tensor (tokens, D) an item, in the same order.

        Raises:
            MMGraphError: The model returned something else than one such tensor an item.
        """
        outputs: list[torch.Tensor] = []
        for modality, items in _groups(mm_kwargs):
            with self._timed(modality, len(items)):
                encoded = self._encode(modality, batch_items(items))
            outputs.extend(_checked(encoded, modality, len(items)))
        return outputs

    def timings(self) -> dict[str, ModalityTiming]:
        """Time spent by modality so far; waits for the device.

        Raises:
            ConfigError: The runner was made without ``timing=True``.
        """
        if self._clock is None:
            raise ConfigError("this runner keeps no timings: make it with timing=True")
        return self._clock.read()

    def _encode(self, modality: str, batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        manager = self.manager
        if manager is not None and manager.is_captured() and manager.supports_modality(modality):
            return manager.execute(batch)
        encoded: Sequence[torch.Tensor] = self.model.embed_multimodal(**batch)
        return encoded

    @contextmanager
    def _timed(self, modality: str, num_items: int) -> Iterator[None]:
        if self._clock is None:
            yield
            return
        with self._clock.measure(modality, num_items):
            yield


def batch_items(items: Sequence[Item]) -> dict[str, Any]:
    """Concatenate the tensors of items of one modality; other fields must be equal.

    Args:
        items: Items with the same fields; one-dimensional tensors count as one row each.

    Returns:
        The fields of the batch.
    """
    first = items[0]
    batch: dict[str, Any] = {}
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            batch[name] = torch.cat([_with_rows(item[name]) for item in items])
        else:
            batch[name] = value
    return batch


def _with_rows(value: torch.Tensor) -> torch.Tensor:
    return value if value.dim() > 1 else value.unsqueeze(0)


def _groups(mm_kwargs: Sequence[tuple[str, Item]]) -> Iterator[tuple[str, list[Item]]]:
    """Neighbours of one modality that can be one batch."""
    for (modality, _), pairs in groupby(mm_kwargs, key=lambda pair: (pair[0], _kind(pair[1]))):
        yield modality, [item for _, item in pairs]


def _kind(item: Item) -> list[tuple[str, Any]]:
    """What items must share to be batched: fields, dtypes, devices, trailing shapes, constants."""
    return [
        (name, (v.dtype, v.device, _with_rows(v).shape[1:]) if isinstance(v, torch.Tensor) else v)
        for name, v in sorted(item.items())
    ]


def _checked(
    encoded: Sequence[torch.Tensor], modality: str, num_items: int
) -> Sequence[torch.Tensor]:
    if not isinstance(encoded, (Sequence, torch.Tensor)):
        raise MMGraphError(
            f"the encoder must return a list of one tensor an item for {modality}, got "
            f"{type(encoded).__name__}"
        )
    if len(encoded) != num_items:
        raise MMGraphError(
            f"the encoder returned {len(encoded)} outputs for {num_items} {modality} items; it "
            "must return one an item"
        )
    for i, output in enumerate(encoded):
        if not isinstance(output, torch.Tensor) or output.dim() < 2:
            got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise MMGraphError(
                f"output {i} of the {modality} encoder must be a tensor (tokens, D), got {got}"
            )
    return encoded


class _Clock:
    """Collects spans; device events are read only when the totals are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._spans: dict[str, list[tuple[int, Any, Any]]] = {}

    @contextmanager
    def measure(self, modality: str, num_items: int) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.setdefault(modality, []).append((num_items, start, self._now()))

    def read(self) -> dict[str, ModalityTiming]:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return {
            modality: ModalityTiming(
                len(spans), sum(n for n, _, _ in spans), sum(self._ms(a, b) for _, a, b in spans)
            )
            for modality, spans in self._spans.items()
        }

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ms(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) if self._cuda else (stop - start) * 1e3)
