"""Recorders of segments that see or change what runs in them, on top of a backend's or alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mmgraph.graphs.backend import CapturedGraph
from mmgraph.graphs.segments import SegmentRecorder

__all__ = ["ModesRecorder"]


class _Nothing(CapturedGraph):
    num_bytes = 0

    def replay(self) -> list[torch.Tensor]:
        return []

    def close(self) -> None:
        pass


class ModesRecorder(SegmentRecorder):
    """Keeps its modes on top of another recorder's, within segments only."""

    def __init__(self, inner: SegmentRecorder | None, *modes: Any) -> None:
        self._inner = inner
        self._modes = modes
        self._entered = ExitStack()
        self._is_open = False

    def begin(self) -> None:
        if self._inner is not None:
            self._inner.begin()
        self._enter()

    def _enter(self) -> None:
        for mode in self._modes:
            self._entered.enter_context(mode)
        self._is_open = True

    def _leave(self) -> None:
        self._is_open = False
        self._entered.close()

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Within the block its modes aren't in force; gives whether they were."""
        was_open = self._is_open
        self._leave()
        try:
            yield was_open
        finally:
            if was_open:
                self._enter()

    def end(self) -> CapturedGraph:
        self._leave()
        return _Nothing() if self._inner is None else self._inner.end()

    def abandon(self) -> None:
        self._leave()
        if self._inner is not None:
            self._inner.abandon()
