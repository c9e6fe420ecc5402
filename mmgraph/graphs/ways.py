"""The two ways of a model: that of eager mode, and the one that it takes while a stream captures.

transformers asks whether a stream captures, and takes other ways through its code then, with other
masks and shapes. Told that none does, a model goes the way of eager mode, and a graph computes what
eager mode does. The other way reads less on the host. A capture has to go the way of its
warm-ups: what they don't compile, tune and allocate is compiled, tuned and allocated in the capture
otherwise, which ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import ran_out_of_memory
from mmgraph.graphs.guard import BrokenCapture, HostAccess
from mmgraph.graphs.patch import ThreadPatch

__all__ = ["Ways", "as_if_capturing", "seems_to_capture"]

_Graph = TypeVar("_Graph")


class Ways:
    """The ways of one backend's captures: that of eager mode first, until CUDA breaks on it."""

    def __init__(self) -> None:
        self._as_if_capturing = False

    def take(self, capture: Callable[[], _Graph]) -> _Graph:
        """Capture one way; where something on it can't be captured, the other way.

        Raises:
            CaptureError: Where neither can: what was in the way of the first.
        """
        first = self._as_if_capturing
        try:
            with as_if_capturing(first):
                return capture()
        except (HostAccess, BrokenCapture) as error:
            kind, why = type(error), str(error)  # not the error: it keeps tensors alive
        try:
            with as_if_capturing(not first):
                graph = capture()
        except CaptureError as error:
            if ran_out_of_memory(error):
                raise
            raise kind(why) from error
        if kind is BrokenCapture:  # each costs a pool: the next capture begins with what works
            self._as_if_capturing = not first
        return graph


@contextmanager
def as_if_capturing(answer: bool) -> Iterator[None]:
    """Within the block transformers is told, in this thread, that a stream captures or not.

    Everybody else is told the truth: libraries have good reasons to ask.
    """
    token = _answer.set(answer)
    try:
        with _told.applied():
            yield
    finally:
        _answer.reset(token)


def seems_to_capture() -> bool:
    """Whether transformers is told so at present."""
    return _answer.get()


def _if_it_is_asked_by_a_model() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")  # behind the patch
    if caller.startswith(_MODELS):
        return _answer.get()
    return torch.cuda.graphs.is_current_stream_capturing()


_MODELS = ("transformers.", "transformers_modules.")
_answer: ContextVar[bool] = ContextVar("mmgraph_as_if_capturing", default=False)
_told = ThreadPatch(torch.cuda, "is_current_stream_capturing", _if_it_is_asked_by_a_model)
