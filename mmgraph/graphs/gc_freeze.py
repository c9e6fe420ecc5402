"""Keeping Python's garbage collector out of captures.

A collection inside a capture can run finalisers that call the CUDA driver and so break it, and one
before each capture costs a third of a second a graph (vLLM PR 54646: 8 s had become 70 s).

The cheapest form that is safe collects nothing. Out of the way is what the collector has to be, and
for that it is enough to disable it and to let explicit calls do nothing while a graph is recorded.
Garbage that holds device memory matters only where memory runs out; there the backend cleans up and
tries again. docs/benchmarks/ has what the collections cost.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mmgraph.env import gc_during_capture
from mmgraph.graphs.patch import ThreadPatch

__all__ = ["clean_up", "freeze_gc_for_cudagraph_capture", "frozen_by_somebody", "undisturbed"]


_IMMORTAL = 5_000


def _nothing(*_: Any, **__: Any) -> int:
    return 0


# Whatever is passed: compilers collect one generation, callers of empty_cache differ as well.
_CLEANING = (
    ThreadPatch(gc, "collect", _nothing),
    ThreadPatch(torch.cuda, "empty_cache", _nothing),
)


class _Collector:
    """The collector, off while any thread needs it to be: the last one turns it on again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep it off within the block."""
        with self._lock:
            if not self._users:
                self._was_on = gc.isenabled()
                gc.disable()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._was_on:
                    gc.enable()


_collector = _Collector()


@contextmanager
def freeze_gc_for_cudagraph_capture() -> Iterator[None]:
    """Freeze and disable the collector around many captures; undo it on every way out.

    The collector ends up enabled only if it was so before. What somebody had frozen already stays
    frozen: ``gc.unfreeze`` can't take back a part, so nothing is added to it.
    ``MMGRAPH_ENABLE_CUDAGRAPH_GC=1`` makes this do nothing.
    """
    if gc_during_capture():
        yield
        return
    with _collector.off():
        was_frozen = frozen_by_somebody()
        if not was_frozen:
            gc.freeze()
        try:
            yield
        finally:
            if not was_frozen:
                gc.unfreeze()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Record within the block: no collection starts, and this thread's calls for one do nothing."""
    with ExitStack() as stack:
        if not gc_during_capture():
            stack.enter_context(_collector.off())
        for patch in _CLEANING:
            stack.enter_context(patch.applied())
        yield


def frozen_by_somebody() -> bool:
    """Whether the process has frozen objects itself.

    From Python 3.12 on a collection sets immortal objects aside too, a few hundred of them.
    """
    return gc.get_freeze_count() > _IMMORTAL


def clean_up() -> None:
    """Collect garbage and hand the device memory that nobody uses back to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
