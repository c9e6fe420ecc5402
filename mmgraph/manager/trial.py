"""Whether optional steps make an encoder's graphs faster, tried at its first capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mmgraph.errors import CaptureError
from mmgraph.graphs import CapturedGraph, GraphBackend
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

    Raises:
        CaptureError: It can't be captured as it is either.
    """
    if not (backend.is_timed and isinstance(model, SupportsTrial) and model.on_trial):
        return capture()
    with model.without_options():
        plain = capture()
    plain_seconds = _timed_and_closed(backend, plain)
    try:
        entry = capture()
    except CaptureError as error:
        model.decide(str(error), failed=True)
        return capture()
    seconds = shortest(backend, entry.graph.replay)
    if seconds < plain_seconds:
        model.decide(None)
        entry.compile_seconds = max(0.0, entry.seconds - plain.seconds)
        return entry
    entry.graph.close()
    model.decide(f"{1e3 * seconds:.2f} ms, as they are {1e3 * plain_seconds:.2f} ms")
    return capture()


def _timed_and_closed(backend: GraphBackend, entry: _Captured) -> float:
    """Seconds of a replay of a graph that goes at once.

    What is captured without the optional steps takes twice the memory, which a pool would keep for
    good; with its last graph it goes, and the next capture starts another.
    """
    try:
        return shortest(backend, entry.graph.replay)
    finally:
        entry.graph.close()
