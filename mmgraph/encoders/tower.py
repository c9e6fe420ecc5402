"""What rows and packed towers have in common: mode checks, eager calls, captured calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from mmgraph.encoders.calls import (
    CallSignature,
    TowerSignature,
    config_flags,
    fingerprint,
    freeze,
    thaw,
)
from mmgraph.encoders.discovery import Tower
from mmgraph.encoders.exact import exact_call
from mmgraph.encoders.inside import eager_towers
from mmgraph.modules.attention import attends_by_segments, attention_implementation
from mmgraph.modules.caches import OwnCaches, private_caches
from mmgraph.modules.placement import first_parameter, main_dtype, placement_problem, widened
from mmgraph.modules.tracing import is_traced
from mmgraph.modules.watch import TowerWatch
from mmgraph.ops import VARLEN_ATTENTION, NoSegmentsError, attending
from mmgraph.preparation import Preparation
from mmgraph.protocol import HeldMemory
from mmgraph.types import (
    BufferSpec,
    EncoderBatch,
    EncoderFacts,
    ExactCall,
    GraphKey,
    Reason,
    Refusal,
)

__all__ = ["TowerEncoder"]

_REMEMBERED_CALLS = 1024


class TowerEncoder(ABC):
    """A tower, called through one of its methods, as ``SupportsEncoderCudaGraph``.

    `mm_kwargs` are the arguments of that method, by name.

    Attributes:
        tower: The tower.
        method: Name of the method.
        signature: Parameters of the method.
        preparation: What makes graphs of the tower fast.
        watch: Notices that the tower is no longer what was captured.
    """

    def __init__(
        self,
        tower: Tower,
        method: str = "forward",
        preparation: Preparation | None = None,
        watch: TowerWatch | None = None,
    ) -> None:
        self.tower = tower
        self.preparation = preparation or Preparation(tower.module, tower.name)
        self.method = method
        self._original: Callable[..., Any] = getattr(tower.module, method)
        self.signature = TowerSignature(getattr(type(tower.module), method), tower.main_input)
        self._config = getattr(tower.module, "config", None)
        self._example_signature: CallSignature | None = None
        self._batches: dict[Hashable, EncoderBatch] = {}
        self._probe = first_parameter(tower.module)
        self._home = self.device
        self.watch = watch or TowerWatch(tower.module, self.preparation.turns)

    @property
    def name(self) -> str:
        """Path of the tower and, if it isn't forward, the method."""
        path = self.tower.name or type(self.tower.module).__name__
        return path if self.method == "forward" else f"{path}.{self.method}"

    @property
    def device(self) -> torch.device:
        """Device of the tower's weights."""
        return self._probe().device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tower's weights."""
        return main_dtype(self.tower.module)

    @abstractmethod
    def encoder_facts(self) -> EncoderFacts: ...

    @abstractmethod
    def example_call(self) -> dict[str, Any]:
        """Arguments of a small valid call, with random contents.

        Raises:
            UnsupportedModelError: The input shape can't be read off the tower.
        """

    @abstractmethod
    def select_items(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[int]
    ) -> dict[str, Any]: ...

    @abstractmethod
    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]: ...

    @abstractmethod
    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]: ...

    @abstractmethod
    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> Any: ...

    @abstractmethod
    def _read_items(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Sizes and signature of a call, whatever mode the tower is in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as it was when the encoder was made, in eager mode."""
        with eager_towers(), self.preparation.turns.together():
            return self._original(*args, **kwargs)

    def embed_multimodal(self, **mm_kwargs: Any) -> Any:
        """Call the tower in eager mode and return its own output."""
        return self.forward(**mm_kwargs)

    def embed_in_float32(self, **mm_kwargs: Any) -> Any:
        """Call a float32 copy of the tower, which nobody keeps; see ``SupportsReference``."""
        with self.preparation.turns.together():  # not of what a capture has made of it
            module = widened(self.tower.module)
        twin = type(self)(replace(self.tower, module=module), self.method, watch=self.watch)
        with private_caches(module):  # the tower's own would keep what the copy puts there
            return twin.embed_multimodal(**mm_kwargs)

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Read the items of a call.

        Raises:
            Refusal: No graph can serve it. What is wrong with the tower's mode comes before what
                is wrong with the call.
        """
        try:
            batch = self._remembered_items(mm_kwargs)
        except Refusal as refusal:
            reason = self._mode_reason(mm_kwargs)
            if reason is None:
                raise
            raise Refusal(reason, refusal.batch, self._detail(reason)) from None
        reason = self._mode_reason(mm_kwargs)
        if reason is not None:
            raise Refusal(reason, batch, self._detail(reason))
        return batch

    def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
        """Take a call apart for a graph of its own; see ``SupportsExactGraphs``.

        Raises:
            Refusal: An argument can't be part of a graph.
        """
        try:
            items = self._remembered_items(mm_kwargs).items
        except Refusal as refusal:
            items = () if refusal.batch is None else refusal.batch.items
        num_tokens = sum(item.num_tokens for item in items)
        flags = (self.method, self._flags())
        return exact_call(mm_kwargs, self.signature, self.device, flags, num_tokens)

    def exact_forward(self, **mm_kwargs: Any) -> Any:
        """Call the tower as ``embed_multimodal`` does, in the way that suits a graph.

        One call attends to all segments, where there are some, whatever the tower is set to.
        """
        if self._attends_by_segments:
            try:
                with (
                    self.preparation.turns.alone(),
                    attention_implementation(self.tower.module, VARLEN_ATTENTION),
                    attending(choices=self.preparation.attention),
                ):
                    return self._prepared_forward(mm_kwargs)
            except NoSegmentsError:  # it has them in other calls, or in other layers
                self._attends_by_segments = False
        return self._prepared_forward(mm_kwargs)

    def _prepared_forward(self, mm_kwargs: Mapping[str, Any]) -> Any:
        return self.preparation.run(lambda: self.embed_multimodal(**mm_kwargs))

    @cached_property
    def _attends_by_segments(self) -> bool:
        return attends_by_segments(self.tower.module)

    def rehearse(self, mm_kwargs: Mapping[str, Any]) -> None:
        """Take `mm_kwargs` as what calls look like, so that ``capture()`` records that kind."""
        signature = self._read_items(mm_kwargs).signature
        assert isinstance(signature, CallSignature)
        self._example_signature = signature

    def example_signature(self) -> CallSignature:
        """Signature of the calls to expect.

        Raises:
            UnsupportedModelError: The input shape can't be read off the tower.
        """
        if self._example_signature is None:
            self.rehearse(self.example_call())
        assert self._example_signature is not None
        return self._example_signature

    def version(self) -> Hashable:
        """Something else whenever graphs that were captured before must not serve."""
        return self.watch.version

    def hold_memory(self) -> HeldMemory | None:
        """Keep what graphs of the tower as it is now read; see ``SupportsLateChanges``."""
        return self.watch.hold()

    @property
    def on_trial(self) -> bool:
        """Whether a graph has still to be compared with one without the optional steps."""
        return self.preparation.on_trial

    @property
    def has_options(self) -> bool:
        """Whether blocks are compiled for graphs."""
        return self.preparation.no_compile is None

    def without_options(self) -> AbstractContextManager[None]:
        """Within the block captures leave out the steps that are on trial."""
        return self.preparation.without_compile()

    def private_caches(self) -> AbstractContextManager[OwnCaches]:
        """Within the block what the tower memoises is kept for the graph that is recorded."""
        return private_caches(self.tower.module)

    def decide(self, why_not: str | None, *, failed: bool = False) -> None:
        """End the trial: keep the steps, or leave them out from now on."""
        self.preparation.decide(why_not, failed=failed)

    def check_placement(self) -> str | None:
        """Say why no graph can use the tower's weights where they are, or ``None``."""
        return placement_problem(self.tower.module)

    def _remembered_items(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Like `_read_items`, at the cost of a lookup where the same kind of call was seen."""
        fingerprint = self._fingerprint(mm_kwargs)
        try:
            batch = self._batches.get(fingerprint)
        except TypeError:  # a config switch that is a list, say: too rare to make it hashable
            return self._read_items(mm_kwargs)
        if batch is None:
            batch = self._read_new(fingerprint, mm_kwargs)
            if not batch.items:
                raise Refusal(Reason.NO_ITEMS, batch)
            if len(self._batches) >= _REMEMBERED_CALLS:
                self._batches.clear()
            self._batches[fingerprint] = batch
        return batch

    def _read_new(self, fingerprint: Hashable, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Like `_read_items`, for a call with a fingerprint that isn't remembered."""
        return self._read_items(mm_kwargs)

    def _fingerprint(self, mm_kwargs: Mapping[str, Any]) -> Hashable:
        """Everything that `_read_items` looks at, as cheaply as that can be had."""
        parts: list[Hashable] = [] if self._config is None else [config_flags(self._config)]
        for name, value in mm_kwargs.items():
            if isinstance(value, torch.Tensor):
                parts.append((name, value.shape, value.dtype, value.device))
            else:
                parts.append((name, fingerprint(value)))
        return tuple(parts)

    def _mode_reason(self, mm_kwargs: Mapping[str, Any]) -> Reason | None:
        if is_traced():
            return Reason.COMPILING
        if self.watch.is_training:
            return Reason.TRAINING
        if self.watch.is_hooked:
            return Reason.HOOKS
        main, device = mm_kwargs.get(self.signature.main_input), self._probe().device
        if not isinstance(main, torch.Tensor):
            return None  # such a call has been refused
        if torch.is_grad_enabled() and (
            self.watch.wants_gradients or any(map(_wants_gradients, mm_kwargs.values()))
        ):
            return Reason.GRAD
        if device != self._home or self.watch.misplaced is not None:
            return Reason.PLACEMENT
        if main.device != device:
            return Reason.DEVICE
        if torch.is_autocast_enabled(device.type):
            return Reason.AUTOCAST
        return None if main.dtype.is_floating_point else Reason.DTYPE

    def _detail(self, reason: Reason) -> str:
        """What there is to say of a reason besides its own words."""
        if reason is not Reason.PLACEMENT:
            return ""
        if self.watch.misplaced is None:
            return f"the encoder has moved from {self._home} to {self.device}: attach it again"
        return self.watch.misplaced

    def _call_signature(
        self, mm_kwargs: Mapping[str, Any], tensors: Sequence[str], left_out: frozenset[str]
    ) -> CallSignature:
        return CallSignature(
            tensors=tuple((n, tuple(mm_kwargs[n].shape[1:]), mm_kwargs[n].dtype) for n in tensors),
            constants=tuple(
                (name, freeze(value))
                for name, value in sorted(mm_kwargs.items())
                if name not in tensors
                and name not in left_out
                and not self.signature.is_default(name, value)
            ),
            flags=self._flags(),
        )

    def _flags(self) -> tuple[Hashable, ...]:
        flags = () if self._config is None else config_flags(self._config)
        return tuple(flag if isinstance(flag, type) else freeze(flag) for flag in flags)

    @staticmethod
    def constants(key: GraphKey) -> dict[str, Any]:
        """Arguments that calls of a graph of `key` have in common."""
        assert isinstance(key.signature, CallSignature)
        return {name: thaw(value) for name, value in key.signature.constants}


def _wants_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
