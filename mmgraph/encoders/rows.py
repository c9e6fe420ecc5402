"""The rows layout: B independent rows, such as fixed-size images, tiles, frames or mel windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmgraph.encoders.calls import CallSignature
from mmgraph.encoders.places import casts_to_integers
from mmgraph.encoders.random_inputs import fractions, normal
from mmgraph.encoders.tower import TowerEncoder
from mmgraph.errors import UnsupportedModelError
from mmgraph.types import (
    BufferSpec,
    EncoderBatch,
    EncoderFacts,
    EncoderItemSpec,
    GraphKey,
    Reason,
    Refusal,
)

__all__ = ["RowsEncoder"]


class RowsEncoder(TowerEncoder):
    """A tower whose tensors all have one entry a row in dimension 0, inputs and outputs alike."""

    def encoder_facts(self) -> EncoderFacts:
        tokens = self._tokens_per_row()
        return EncoderFacts(
            name=self.name,
            modalities=self.tower.modalities,
            layout="rows",
            tokens_per_row=tokens,
            token_granularity=tokens,
            min_tokens=tokens,
            max_tokens=32 * tokens,
            eager_returns="tree",
            probes=self._probes,
            examples=self._examples,
        )

    def example_call(self) -> dict[str, Any]:
        shape = _row_shape(self.tower.module)
        if shape is None:
            raise UnsupportedModelError(
                f"the input size of {self.name} can't be read off its config: call it once with "
                "real inputs (capture='lazy'), then capture() knows it"
            )
        return {self.signature.main_input: normal((1, *shape), self.device, self.dtype)}

    def select_items(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        return {
            name: value[list(items)] if isinstance(value, torch.Tensor) else value
            for name, value in mm_kwargs.items()
        }

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        assert isinstance(key.signature, CallSignature)
        rows = key.token_budget // self._tokens_per_row()
        return {
            name: BufferSpec((rows, *shape), dtype, self._example(key, dtype))
            for name, shape, dtype in key.signature.tensors
        }

    def _example(self, key: GraphKey, dtype: torch.dtype) -> torch.Tensor | None:
        """For a whole buffer: a warm-up may read masks as sizes, and contents as places."""
        if not dtype.is_floating_point:
            return torch.ones((), dtype=dtype)
        return torch.zeros((), dtype=dtype) if self._reads_places(key) else None

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        assert isinstance(key.signature, CallSignature)
        names = [name for name, _, _ in key.signature.tensors]
        if len(items) == len(batch.items):
            return {name: [mm_kwargs[name]] for name in names}
        return {name: [mm_kwargs[name][a:b] for a, b in runs(items)] for name in names}

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> Any:
        call = {**buffers, **self.constants(key)}
        return self.preparation.run(lambda: self.forward(**call))

    def _read_items(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        main = mm_kwargs.get(self.signature.main_input)
        if not isinstance(main, torch.Tensor) or main.dim() < 2:
            raise Refusal(Reason.UNSUPPORTED_CALL, detail=f"no {self.signature.main_input}")
        num_rows = main.shape[0]
        batch = EncoderBatch((EncoderItemSpec(self._tokens_per_row()),) * num_rows)
        tensors = sorted(n for n, value in mm_kwargs.items() if isinstance(value, torch.Tensor))
        for name in tensors:
            value = mm_kwargs[name]
            if value.dim() == 0 or value.shape[0] != num_rows:
                if value.dim() == 1 and not value.is_floating_point():  # lengths, packed frames
                    batch = EncoderBatch(batch.items[:1] * value.shape[0])
                raise Refusal(
                    Reason.UNSUPPORTED_CALL, batch, f"{name} does not have one entry a row"
                )
            if value.device != main.device:
                sizes = not value.is_floating_point()  # on the host a tower may read them
                raise Refusal(Reason.UNSUPPORTED_CALL if sizes else Reason.DEVICE, batch)
        try:
            signature = self._call_signature(mm_kwargs, tensors, frozenset())
        except Refusal as refusal:
            raise Refusal(refusal.reason, batch, str(refusal)) from None
        return EncoderBatch(batch.items, signature)

    def _examples(self, budget: int, max_items: int) -> Sequence[EncoderBatch]:
        tokens = self._tokens_per_row()
        rows = (EncoderItemSpec(tokens),) * max(1, budget // tokens)
        return [EncoderBatch(rows, self.example_signature())]

    def _probes(self, key: GraphKey) -> Sequence[Mapping[str, Any]]:
        """A call that fills the graph, with full masks, and one with a row less and partial masks.

        transformers leaves out a mask that masks nothing, except while it is being captured. Some
        towers do more than leave it out then (Phi-4-multimodal's attention becomes causal), so a
        graph with a mask argument can be right for one mask and wrong for another.
        """
        rows = key.token_budget // self._tokens_per_row()
        return [
            self._probe_call(key, rows, full=True),
            self._probe_call(key, max(1, rows - 1), full=False),
        ]

    def _probe_call(self, key: GraphKey, rows: int, *, full: bool) -> dict[str, Any]:
        assert isinstance(key.signature, CallSignature)
        probe = self.constants(key)
        for name, shape, dtype in key.signature.tensors:
            if dtype.is_floating_point:
                probe[name] = self._contents(key, rows, *shape, seed=1 + full).to(dtype)
                continue
            probe[name] = torch.ones(rows, *shape, dtype=dtype, device=self.device)
            if not full and shape:
                probe[name][..., (shape[-1] + 1) // 2 :] = 0
        return probe

    def _contents(self, key: GraphKey, *shape: int, seed: int) -> torch.Tensor:
        """Random contents, none of which the tower can take for a place that isn't there."""
        make = fractions if self._reads_places(key) else normal
        return make(shape, self.device, self.dtype, seed)

    def _reads_places(self, key: GraphKey) -> bool:
        if self._has_places is None:
            call = self._small_call(key)
            self._has_places = casts_to_integers(lambda: self.forward(**call))
        return self._has_places

    def _small_call(self, key: GraphKey) -> dict[str, Any]:
        assert isinstance(key.signature, CallSignature)
        call = self.constants(key)
        for name, shape, dtype in key.signature.tensors:
            call[name] = torch.ones(1, *shape, dtype=dtype, device=self.device)
            if dtype.is_floating_point:
                call[name] = fractions((1, *shape), self.device, self.dtype).to(dtype)
        return call

    _has_places: bool | None = None

    def _tokens_per_row(self) -> int:
        if self._tokens is None:
            self._tokens = _tokens_of(self.tower.module)
        return self._tokens

    _tokens: int | None = None


def runs(items: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of consecutive numbers in the ascending `items`."""
    ranges: list[tuple[int, int]] = []
    for item in items:
        if ranges and ranges[-1][1] == item:
            ranges[-1] = (ranges[-1][0], item + 1)
        else:
            ranges.append((item, item + 1))
    return ranges


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return (int(value[0]), int(value[1]))
    return None


def _row_shape(module: nn.Module) -> tuple[int, ...] | None:
    config = getattr(module, "config", None)
    pretrained = getattr(module, "pretrained_cfg", None)
    if config is None and pretrained:
        size = _pair(getattr(getattr(module, "patch_embed", None), "img_size", None))
        _, height, width = pretrained.get("input_size") or (3, 224, 224)
        return (getattr(module, "in_chans", 3), *(size or (height, width)))
    size = _pair(getattr(config, "image_size", None))
    if size is not None:
        return (int(getattr(config, "num_channels", 3)), *size)
    mels, positions = (getattr(config, a, None) for a in ("num_mel_bins", "max_source_positions"))
    if isinstance(mels, int) and isinstance(positions, int):
        return (mels, 2 * positions)  # Whisper and its kin: a convolution of stride 2
    return None


def _tokens_of(module: nn.Module) -> int:
    """Tokens of a row as far as the config tells: for budgets and reports, never for shapes."""
    config = getattr(module, "config", None)
    shape = _row_shape(module)
    embed = getattr(module, "patch_embed", None)
    patch = _pair(getattr(config, "patch_size", None) or getattr(embed, "patch_size", None))
    if shape is None:
        return 1
    if len(shape) == 2:
        return max(1, shape[1] // 2)
    if patch is None:
        return 1
    return max(1, (shape[1] // patch[0]) * (shape[2] // patch[1]))
