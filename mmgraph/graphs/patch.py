"""Functions of other modules, replaced for the threads that are inside a block and nobody else."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["ThreadPatch", "as_if_capturing"]


class ThreadPatch:
    """A function that behaves differently in some threads for a while.

    The attribute is replaced when the first block is entered and put back when the last is left,
    unless somebody has replaced it again in between: then theirs stays, and calls the original.

    Args:
        owner: The module.
        name: The function in it.
        instead: What threads inside a block get; takes whatever the callers of the function pass.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._instead = instead
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._original: Any = None
        self._patch: Any = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the function within the block, for this thread."""
        thread = threading.get_ident()
        with self._lock:
            if not self._inside:
                self._original = getattr(self._owner, self._name)
                self._patch = self._make(self._original)
                setattr(self._owner, self._name, self._patch)
            self._inside.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(thread)
                if not self._inside and getattr(self._owner, self._name) is self._patch:
                    setattr(self._owner, self._name, self._original)

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() in self._inside:
                return self._instead(*args, **kwargs)
            return original(*args, **kwargs)

        return patched


@contextmanager
def as_if_capturing(answer: bool) -> Iterator[None]:
    """Within the block models are told, in this thread, that a stream captures or that none does.

    transformers takes other ways through its code while a stream captures, with other masks and
    shapes. Told that none does, a model goes the way of eager mode, which is the faster one where
    it can be captured. The other way reads less on the host. Warm-ups have to go the way of the
    capture: what they don't compile, tune and allocate is compiled, tuned and allocated in the
    capture otherwise, which ends it.
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
"""Who has to know: the compiler, for one, refuses to compile while a stream really captures."""
_answer: ContextVar[bool] = ContextVar("mmgraph_as_if_capturing", default=False)
_told = ThreadPatch(torch.cuda, "is_current_stream_capturing", _unless_it_is_asked_by_us)
