"""What an encoder must offer so that it can run from graphs.

Engine authors implement :class:`SupportsEncoderCudaGraph` for their own models;
``mmgraph.encoders`` implements it once for the towers of transformers and timm.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from mmgraph.types import BufferSpec, EncoderBatch, EncoderFacts, ExactCall, GraphKey

__all__ = [
    "HeldMemory",
    "SupportsChanges",
    "SupportsDivision",
    "SupportsEncoderCudaGraph",
    "SupportsExactGraphs",
    "SupportsLateChanges",
    "SupportsMultiModal",
    "SupportsNumBytes",
    "SupportsPrivateCaches",
    "SupportsReference",
    "SupportsTrial",
    "supports_encoder_cudagraph",
]


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model that turns multimodal inputs into embeddings, in eager mode."""

    def embed_multimodal(self, **mm_kwargs: Any) -> Any:
        """Return one tensor (tokens, D) an item of the one modality in `mm_kwargs`."""


@runtime_checkable
class SupportsEncoderCudaGraph(SupportsMultiModal, Protocol):
    """An encoder whose forward, given its metadata, is a pure function of tensors."""

    def encoder_facts(self) -> EncoderFacts:
        """Return what this encoder is; called once, when a manager is made."""

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Read the sizes of the items of a call, without a host sync where they are on the CPU.

        Raises:
            mmgraph.types.Refusal: No graph can serve this call.
        """

    def select_items(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of a call with only the items at the indices `items`."""

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        """Describe the static buffers of `key`, with contents that are valid for it."""

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        """Return, for each buffer, the pieces that are laid end to end from its first row on.

        Rows beyond them keep what they held: they must not be able to reach a real output.
        """

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> Any:
        """Run the encoder on the buffers of `key`; called a few times and recorded once.

        Returns a tensor or a pytree of tensors. Each has either `key.token_budget` divided by a
        whole number as one of its first two dimensions, or (rows layout) one entry a row.
        """


@runtime_checkable
class SupportsExactGraphs(SupportsEncoderCudaGraph, Protocol):
    """An encoder whose calls can also have graphs of their own, outside the budgets."""

    def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
        """Take a call apart; may read small tensors on the host.

        Raises:
            mmgraph.types.Refusal: The call can't have a graph of its own either.
        """

    def exact_forward(self, **mm_kwargs: Any) -> Any:
        """Return what ``embed_multimodal`` returns, computed in the way that suits a graph."""


@runtime_checkable
class SupportsDivision(Protocol):
    """An encoder with items that are the same to it in parts: videos, where frames are apart."""

    def divided(self, batch: EncoderBatch, max_tokens: int) -> EncoderBatch | None:
        """`batch` with items of more than `max_tokens` in parts, each an item; or ``None``.

        All parts of an item but the first have ``is_rest`` set. ``replay_inputs`` takes the result
        in place of `batch`, with the call's own arguments.
        """


@runtime_checkable
class SupportsTrial(Protocol):
    """An encoder that can be captured with steps for speed whose worth is still to be shown."""

    @property
    def on_trial(self) -> bool:
        """Whether a graph with these steps has still to be compared with one without."""

    @property
    def has_options(self) -> bool:
        """Whether captures take such steps at all."""

    def without_options(self) -> AbstractContextManager[None]:
        """Within the block captures leave these steps out."""

    def decide(self, why_not: str | None, *, failed: bool = False) -> None:
        """End the trial: keep the steps, or leave them out from now on because of `why_not`.

        They may have `failed`, or just not have been faster.
        """


@runtime_checkable
class SupportsReference(SupportsMultiModal, Protocol):
    """An encoder that can say what is right, where half precision leaves that open."""

    def embed_in_float32(self, **mm_kwargs: Any) -> Any:
        """Return what ``embed_multimodal`` returns, computed and given in float32.

        Called where a fresh graph in half precision is further from eager mode than two kernels
        usually are. Floating-point tensors among `mm_kwargs` are float32, and all tensors are
        copies; autocast is off, and so is TensorFloat-32. Nothing of it may be kept. Whatever it
        raises, the graph is refused.
        """


class SupportsNumBytes(Protocol):
    """Something that takes memory."""

    @property
    def num_bytes(self) -> int:
        """How much, in bytes."""


@runtime_checkable
class SupportsPrivateCaches(Protocol):
    """An encoder that keeps tables from one call to the next, which graphs must not share."""

    def private_caches(self) -> AbstractContextManager[SupportsNumBytes]:
        """Within the block its caches are empty ones of their own; afterwards as they were.

        The value of the block, what they hold in the end, is kept for as long as the graph that
        was recorded in it, and its memory counts as the graph's.
        """


@runtime_checkable
class SupportsChanges(Protocol):
    """An encoder that notices when its graphs are out of date."""

    def version(self) -> Hashable:
        """Something else whenever graphs that were captured before must not serve."""


class HeldMemory(Protocol):
    """Memory that outlives what it belonged to, for as long as this lives."""

    def is_there(self) -> bool:
        """Whether a replay may read it now; asked before each, so it must be cheap."""


@runtime_checkable
class SupportsLateChanges(SupportsChanges, Protocol):
    """An encoder that keeps what its graphs read, so that changes may be noticed a moment late."""

    def hold_memory(self) -> HeldMemory | None:
        """Keep the memory that graphs of the encoder as it is now read; ``None`` if that can't be.

        While it is there, the manager asks for the version while a replay runs, and throws the
        outputs away if that is a new one. What is returned is dropped with the graphs.
        """


def supports_encoder_cudagraph(model: object) -> bool:
    """Whether `model` implements :class:`SupportsEncoderCudaGraph`."""
    return isinstance(model, SupportsEncoderCudaGraph)
