"""What a graph backend is: capture a callable on static buffers, replay it, own a memory pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

__all__ = ["CapturedGraph", "GraphBackend", "Runnable", "ran_out_of_memory", "without_frames"]

_Error = TypeVar("_Error", bound=BaseException)

Runnable = Callable[[Mapping[str, torch.Tensor]], "list[torch.Tensor]"]
"""A function of named buffers that returns a flat list of tensors."""


class CapturedGraph(ABC):
    """A recorded call. Its inputs are the buffers that it was captured on."""

    num_bytes: int
    """Device memory that the capture took, in bytes; 0 where that is unknown."""

    @abstractmethod
    def replay(self) -> list[torch.Tensor]:
        """Run the recording on the current stream.

        Returns:
            Tensors that are valid until the next replay of any graph of the same pool.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the recording; a second call does nothing."""


class GraphBackend(ABC):
    """Captures graphs on one device. All graphs of one backend share one memory pool.

    Attributes:
        before_capture_ends: Called in order just before each recording ends, on the stream that is
            being captured (of each segment, in a breakable capture). Whoever copies weights on a
            stream of their own, forked from that one, joins it here:
            ``torch.cuda.current_stream().wait_stream(copies)``; a capture with a stream left
            unjoined fails. They are not called for warm-ups, nor where the call itself fails.
    """

    name: str
    is_timed: bool
    """Whether a replay is meant to be faster than the call that was captured."""

    def __init__(self) -> None:
        self.before_capture_ends: list[Callable[[], None]] = []

    def about_to_end(self) -> None:
        """Call the hooks; backends do so where a recording ends."""
        for hook in self.before_capture_ends:
            hook()

    @property
    def keeps_memory(self) -> bool:
        """Whether what a graph took stays with others when it is closed."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that it was given on the current stream."""

    @abstractmethod
    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: Hashable = None
    ) -> CapturedGraph:
        """Warm `run` up on `buffers`, then record one call of it.

        Out of memory is met once with a clean-up before it counts as a failure.

        Args:
            run: What to capture.
            buffers: What it is captured on.
            like: Stands for the code that `run` goes through. What was looked for in a capture
                like this one needn't be looked for again; ``None`` is like no other.

        Raises:
            CaptureError: It can't be recorded. The process is left as it was before.
        """

    @abstractmethod
    def use_pool(self, pool: Any | None) -> None:
        """Allocate from `pool`, of ``torch.cuda.graph_pool_handle()``; call before any capture."""

    @abstractmethod
    def ordered(self) -> AbstractContextManager[Any]:
        """Run a block alone: after every earlier block, whatever thread or stream that was on."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything in blocks of ``ordered()`` is done, on whatever stream it was."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether somebody else is recording on the current stream, so that nothing may start."""


_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How libraries that don't allocate through torch say it."""


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error` comes from a lack of device memory."""
    return any(
        isinstance(e, torch.OutOfMemoryError)
        or (isinstance(e, RuntimeError) and any(text in str(e) for text in _NO_MEMORY))
        for e in _chain(error)
    )


def without_frames(error: _Error) -> _Error:
    """Make an error that is kept let go of what its frames hold: the tensors that filled memory."""
    for e in _chain(error):
        e.__traceback__ = None
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
