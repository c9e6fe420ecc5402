"""The vocabulary shared by all layers: items, keys of graphs, and reasons for eager mode.

Letters in shapes: T packed patches, M merged tokens, D width, H heads, K head dim, B items,
S attention segments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "BufferSpec",
    "EncoderBatch",
    "EncoderFacts",
    "EncoderItemSpec",
    "ExactCall",
    "GraphKey",
    "ProbeCall",
    "Reason",
    "Refusal",
]


class Reason(Enum):
    """Why items ran in eager mode; docs/reasons.md says what can be done about each.

    The set is closed, so that statistics add up.
    """

    ENFORCE_EAGER = "enforce_eager is set"
    DISABLED = "cudagraph_mm_encoder is off"
    UNSUPPORTED_MODEL = "the encoder can't be captured"
    UNSUPPORTED_CALL = "the call has arguments that a graph can't take"
    NO_ITEMS = "the call holds no items"
    NOT_CAPTURED = "no graph that could hold it is captured"
    ABOVE_BUDGET = "the item is larger than every budget"
    GRAPH_LIMIT = "max_graphs is reached"
    CAPTURE_FAILED = "capture failed earlier"
    OUT_OF_MEMORY = "memory ran out while capturing"
    MEMORY_LIMIT = "max_graph_bytes is reached"
    PIECEWISE = "mode='piecewise', and the call has not come twice"
    NOT_FASTER = "its graph was no faster than eager mode"
    DATA_DEPENDENT = "sizes within the encoder depend on the contents of the call"
    TRAINING = "the encoder is in training mode"
    HOOKS = "a submodule has hooks, which a replay wouldn't call"
    CHANGED = "the encoder has changed since its graphs were captured"
    DIFFERED = "a replay differed from eager mode when it was compared"
    GRAD = "gradients are required"
    AUTOCAST = "autocast is active"
    DTYPE = "the inputs have a dtype that graphs don't take"
    DEVICE = "the inputs are not on the encoder's device"
    PLACEMENT = "the encoder is on meta, offloaded, split over devices or moved to another"
    COMPILING = "the call is being traced or captured by somebody else"
    MODE_NONE = "the decoder's CUDAGraphMode is NONE"
    NO_WRAPPER = "no wrapper of that mode took part in the forward"
    DETACHED = "the handle was shut down"


class Refusal(Exception):
    """Raised by an encoder for a call that no graph can serve; the call then runs in eager mode."""

    def __init__(self, reason: Reason, batch: EncoderBatch | None = None, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason
        self.batch = batch

    @property
    def num_items(self) -> int:
        """Items of the call; a call that can't be read counts as one."""
        return 1 if self.batch is None else len(self.batch.items)


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """One image, video or audio clip as the planner sees it.

    Attributes:
        num_tokens: Rows of the tower that the item occupies.
        num_segments: Attention segments of the item, one entry for each kind of attention in the
            tower (full, windowed); empty where rows are independent.
        max_seqlen: Longest segment of each kind, in tokens.
        geometry: What else the encoder needs to know of the item, for example its grid (t, h, w).
        is_rest: Whether it goes on with the item before it, which was divided; it isn't counted.
    """

    num_tokens: int
    num_segments: tuple[int, ...] = ()
    max_seqlen: tuple[int, ...] = ()
    geometry: tuple[int, ...] = ()
    is_rest: bool = False

    @property
    def squares(self) -> int:
        """What attention of the first kind computes: squares of its segments' lengths, at most."""
        if not self.num_segments:
            return 0
        return self.num_segments[0] * self.max_seqlen[0] ** 2


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """The items of one call and what they share.

    Attributes:
        items: One spec an item, in the order of the call.
        signature: Everything else that a capture of this call would bake in: names, trailing
            shapes and dtypes of its tensors and the values of its other arguments.
    """

    items: tuple[EncoderItemSpec, ...]
    signature: Hashable = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.items, self.signature)))

    def __hash__(self) -> int:
        """Known from the start: batches and keys are looked up several times a call."""
        return self._hash

    def __reduce__(self) -> tuple[type[EncoderBatch], tuple[Any, ...]]:
        """Pickle without the hash: that of a string differs between processes."""
        return (type(self), (self.items, self.signature))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is recorded for. Every field is baked in or is an upper bound.

    Attributes:
        token_budget: Rows of the tower's input (baked).
        segment_capacity: Segments of each kind of attention (upper bound).
        max_seqlen: Longest segment of each kind (upper bound).
        signature: See :class:`EncoderBatch` (baked).
        exact: For a graph of one exact call: see :class:`ExactCall` (baked).
        uniform: For each kind of attention whether its segments are all exactly as long as the
            bound and fill the budget, so that they can be a dense batch (baked); empty if none are.
    """

    token_budget: int
    segment_capacity: tuple[int, ...] = ()
    max_seqlen: tuple[int, ...] = ()
    signature: Hashable = None
    exact: Hashable = None
    uniform: tuple[bool, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bounds = (self.token_budget, self.segment_capacity, self.max_seqlen, self.uniform)
        object.__setattr__(self, "_hash", hash((bounds, self.signature, self.exact)))

    def __hash__(self) -> int:
        """Known from the start, see :class:`EncoderBatch`."""
        return self._hash

    def __reduce__(self) -> tuple[type[GraphKey], tuple[Any, ...]]:
        """Pickle without the hash, see :class:`EncoderBatch`."""
        bounds = (self.token_budget, self.segment_capacity, self.max_seqlen)
        return (type(self), (*bounds, self.signature, self.exact, self.uniform))

    def covers(self, other: GraphKey) -> bool:
        """Whether a graph of this key can serve whatever one of `other` can."""
        if self.uniform:
            return self == other
        return (
            self.signature == other.signature
            and self.exact == other.exact
            and self.token_budget >= other.token_budget
            and len(self.max_seqlen) == len(other.max_seqlen)
            and all(a >= b for a, b in _pairs(self.segment_capacity, other.segment_capacity))
            and all(a >= b for a, b in _pairs(self.max_seqlen, other.max_seqlen))
        )

    def of(self, signature: Hashable) -> GraphKey:
        """The same key for calls of another signature."""
        return replace(self, signature=signature)

    def joined(self, other: GraphKey) -> GraphKey:
        """The least key that covers this one and `other`, which has the same tokens and kind."""
        return replace(
            self,
            segment_capacity=tuple(
                max(pair) for pair in _pairs(self.segment_capacity, other.segment_capacity)
            ),
            max_seqlen=tuple(max(pair) for pair in _pairs(self.max_seqlen, other.max_seqlen)),
        )

    def __str__(self) -> str:
        parts = [f"{self.token_budget} tokens"]
        if self.segment_capacity:
            parts.append("segments <= " + "/".join(map(str, self.segment_capacity)))
            parts.append("seqlen <= " + "/".join(map(str, self.max_seqlen)))
        if self.uniform:
            parts.append("segments of one length")
        if self.exact is not None:
            parts.append("one exact call")
        return ", ".join(parts)


def _pairs(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(a, b, strict=True)


@dataclass(frozen=True, slots=True)
class ExactCall:
    """A call taken apart for a graph that serves this very call, up to what `contents` hold.

    Attributes:
        key: Everything about the call but what `contents` hold.
        contents: Tensors that are copied into the graph's buffers before each replay.
        others: The other arguments; tensors among them are small, and their values are in `key`.
        num_tokens: Tokens of the call as far as they are known, for reports.
    """

    key: Hashable
    contents: Mapping[str, torch.Tensor]
    others: Mapping[str, Any]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A static input buffer of a graph.

    Attributes:
        shape: Full shape for the key; dimension 0 grows with the key, the others are fixed.
        dtype: Element type.
        example: Contents that are valid for the key, of this shape or broadcast to it, used while
            it is warmed up and captured; ``None`` means random numbers, or zeros where they
            aren't floating-point.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    example: torch.Tensor | None = None


class ProbeCall(dict[str, Any]):
    """Arguments of a probe of several items, or one, each of which is known by a name.

    Args:
        arguments: Of the call.
        names: Of its items, in order. Items of one name are the same numbers in every call, and
            what else their answer hangs on (other arguments, switches of the config) is the same.
    """

    def __init__(self, arguments: Mapping[str, Any], names: Sequence[Hashable]) -> None:
        super().__init__(arguments)
        self.names = tuple(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderFacts:
    """What an encoder is, as opposed to what its user wants of it.

    Attributes:
        name: Where the encoder sits in its model, for messages.
        modalities: Of "image", "video", "audio".
        layout: "rows" (independent rows) or "packed" (concatenated patches).
        tokens_per_row: Tokens of one row in the "rows" layout; 1 where unknown or packed.
        token_granularity: Every token count is a multiple of this (spatial merging).
        min_tokens: Tokens of the smallest sensible item.
        max_tokens: Tokens of the largest item that should be captured by default.
        eager_returns: "tree" if ``embed_multimodal`` returns what ``encoder_forward`` returns,
            "items" if it returns one tensor an item; then only the first tensor that
            ``encoder_forward`` returns is kept.
        uniform_graphs: Whether graphs for segments of one length are worth keys of their own.
        probes: Calls that a fresh graph of a key must answer as eager mode does before it serves;
            ``None`` for encoders that always take the same way through their code. What a
            :class:`ProbeCall` consists of is answered once for all graphs of a capture up front.
        examples: Batches that calls of about `budget` tokens and at most `max_items` items look
            like, given both; what they need is captured up front.
    """

    name: str
    modalities: tuple[str, ...]
    layout: Literal["rows", "packed"]
    tokens_per_row: int = 1
    token_granularity: int = 1
    min_tokens: int = 1
    max_tokens: int = 1
    eager_returns: Literal["tree", "items"] = "items"
    uniform_graphs: bool = False
    probes: Callable[[GraphKey], Sequence[Mapping[str, Any]]] | None = None
    examples: Callable[[int, int], Sequence[EncoderBatch]]
