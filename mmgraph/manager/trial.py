"""Whether optional steps make an encoder's graphs faster, tried at its first capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mmgraph.errors import CaptureError
from mmgraph.graphs import (
    BreakableGraph,
    CapturedGraph,
    GraphBackend,
    HostAccess,
    ReadsContents,
)
from mmgraph.graphs.backend import ran_out_of_memory
from mmgraph.manager.verify import shortest
from mmgraph.protocol import SupportsTrial

__all__ = ["tried"]


class _Captured(Protocol):
    """A graph with what its capture took.

    Attributes:
        seconds: The whole capture.
        compile_seconds: What the optional steps added to that.
    """

    seconds: float
    compile_seconds: float

    @property
    def graph(self) -> CapturedGraph:
        """The graph."""


_Entry = TypeVar("_Entry", bound=_Captured)


def tried(model: object, backend: GraphBackend, capture: Callable[[], _Entry]) -> _Entry:
    """Capture; the first time also without what is on trial, and keep the faster one.

    Later on what is captured with the optional steps is captured without, if they are in its way.

    Raises:
        CaptureError: It can't be captured as it is either.
    """
    if not isinstance(model, SupportsTrial):
        return capture()
    if not (backend.is_timed and model.on_trial):
        return _plain_if_need_be(model, capture)
    with model.without_options():
        plain = capture()
    plain_seconds, took, num_bytes = _closed(backend, plain), plain.seconds, plain.graph.num_bytes
    kept = num_bytes if backend.keeps_memory else 0
    del plain  # and the tables and buffers that only it reads
    try:
        entry = capture()
    except CaptureError as error:
        model.decide(str(error), failed=True)
        entry = capture()
        entry.graph.num_bytes += kept
        return entry
    entry.graph.num_bytes += kept
    if isinstance(entry.graph, BreakableGraph) and entry.graph.num_fast == 0:
        return entry  # no block was recorded in another way: nothing was tried
    seconds = _seconds(backend, entry)
    if seconds < plain_seconds:
        model.decide(None)
        entry.compile_seconds = max(0.0, entry.seconds - took)
        return entry
    entry.graph.close()
    model.decide(f"{1e3 * seconds:.2f} ms, as they are {1e3 * plain_seconds:.2f} ms")
    return capture()


def _plain_if_need_be(model: SupportsTrial, capture: Callable[[], _Entry]) -> _Entry:
    try:
        return capture()
    except (ReadsContents, HostAccess):  # as it would be read without
        raise
    except CaptureError as error:
        if ran_out_of_memory(error) or model.on_trial or not model.has_options:
            raise
    with model.without_options():
        return capture()


def _closed(backend: GraphBackend, entry: _Captured) -> float:
    """Seconds of a replay of a graph that goes at once.

    What is captured without the optional steps takes twice the memory, which a pool would keep for
    good; with its last graph it goes, and the next capture starts another.
    """
    seconds = _seconds(backend, entry)
    entry.graph.close()
    return seconds


def _seconds(backend: GraphBackend, entry: _Captured) -> float:
    """Seconds of a replay; a graph that can't be timed is closed."""
    try:
        return shortest(backend, entry.graph.replay)
    except BaseException:
        entry.graph.close()
        raise
