"""The two ways of a model: that of eager mode, and the one that it takes while a stream captures.

transformers asks whether a stream captures, and takes other ways through its code then, with other
masks and shapes. Told that none does, a model goes the way of eager mode, which is the faster one
where it can be captured. The other one reads less on the host. A capture has to go the way of its
warm-ups: what they don't compile, tune and allocate is compiled, tuned and allocated in the capture
otherwise, which ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

from mmgraph.graphs.guard import HostAccess
from mmgraph.graphs.patch import ThreadPatch

__all__ = ["Way", "as_if_capturing"]


class Way:
    """Which way the models of one backend go: that of eager mode until one reads on it."""

    def __init__(self) -> None:
        self._as_captured = False

    def taken(self) -> AbstractContextManager[None]:
        """Within the block models go this way."""
        return as_if_capturing(self._as_captured)

    def find(self, runs: Callable[[], object]) -> None:
        """Do guarded runs the way of eager mode; where they read on the host, the other way.

        That is the way from then on: models read in one call what they read in all.

        Raises:
            HostAccess: They read either way.
        """
        try:
            with self.taken():
                runs()
            return
        except HostAccess:
            if self._as_captured:
                raise
        self._as_captured = True
        try:
            with self.taken():
                runs()
        except BaseException:
            self._as_captured = False
            raise


@contextmanager
def as_if_capturing(answer: bool) -> Iterator[None]:
    """Within the block models are told, in this thread, that a stream captures or that none does.

    A caller that has to know, the compiler for one, is told the truth.
    """
    token = _answer.set(answer)
    try:
        with _told.applied():
            yield
    finally:
        _answer.reset(token)


def _unless_it_is_asked_by_us() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")  # behind the patch
    if caller.startswith(_NOT_MODELS):
        return torch.cuda.graphs.is_current_stream_capturing()
    return _answer.get()


_NOT_MODELS = ("torch.", "mmgraph.", "triton.", "torchao.", "bitsandbytes.", "flash_attn.")
"""Who has to know: the compiler refuses to compile while a stream really captures."""
_answer: ContextVar[bool] = ContextVar("mmgraph_as_if_capturing", default=False)
_told = ThreadPatch(torch.cuda, "is_current_stream_capturing", _unless_it_is_asked_by_us)
