"""Which graphs a model runs from, and the context that says so for one forward.

The mode is decided outside a model and read inside it, far down, by wrappers that nobody hands
it to; a ContextVar carries it, so that threads and tasks don't see each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum

from mmgraph.errors import ConfigError

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "ForwardContext",
    "GraphLog",
    "current_forward_context",
    "forward_context",
]


class CUDAGraphMode(Enum):
    """How a model runs; a single forward runs in NONE, PIECEWISE or FULL."""

    NONE = "none"
    """Eagerly."""
    PIECEWISE = "piecewise"
    """From graphs between operations that stay eager."""
    FULL = "full"
    """From one graph."""
    FULL_AND_PIECEWISE = "full_and_piecewise"
    """From one graph where there is one for the batch, otherwise in pieces: a setting, which each
    forward resolves to one of the two."""

    def has_full_cudagraphs(self) -> bool:
        """Whether forwards may run in mode FULL."""
        return self in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether forwards may run in mode PIECEWISE."""
        return self in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What the graphs of a wrapper are keyed by.

    Attributes:
        num_tokens: Tokens of the batch, padding included.
        num_items: Items of the batch, or ``None`` where graphs don't depend on it.
        extra: Whatever else a capture of this batch bakes in.
    """

    num_tokens: int
    num_items: int | None = None
    extra: Hashable = None


class GraphLog:
    """What wrappers did in a forward, for whoever started it.

    Attributes:
        served: How many wrappers ran from a graph.
    """

    def __init__(self) -> None:
        self.served = 0
        self._undo: list[Callable[[], None]] = []

    @property
    def num_captured(self) -> int:
        """Graphs that are new since the forward."""
        return len(self._undo)

    def captured(self, undo: Callable[[], None]) -> None:
        """Note a new graph and how to free it."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Free those graphs; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """How the forward that is running now runs.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: The batch.
        capture_allowed: Whether a wrapper without a graph for the batch may capture one.
        log: Where wrappers note what they did.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    capture_allowed: bool = False
    log: GraphLog = field(default_factory=GraphLog, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mode, CUDAGraphMode):
            raise ConfigError(f"mode must be a CUDAGraphMode, got {self.mode!r}")
        if self.mode is CUDAGraphMode.FULL_AND_PIECEWISE:
            raise ConfigError(
                "a forward runs in mode NONE, PIECEWISE or FULL: resolve FULL_AND_PIECEWISE to one "
                "of them for this batch"
            )


_current: ContextVar[ForwardContext | None] = ContextVar("mmgraph_forward_context", default=None)


def current_forward_context() -> ForwardContext | None:
    """The context of the forward that is running, or ``None`` outside one."""
    return _current.get()


@contextmanager
def forward_context(
    mode: CUDAGraphMode, descriptor: BatchDescriptor, *, capture_allowed: bool = False
) -> Iterator[ForwardContext]:
    """Run a forward in a mode; contexts nest, the innermost counts.

    Raises:
        ConfigError: `mode` is no CUDAGraphMode, or FULL_AND_PIECEWISE, which is a setting and no
            mode of a forward.
    """
    context = ForwardContext(mode, descriptor, capture_allowed)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
