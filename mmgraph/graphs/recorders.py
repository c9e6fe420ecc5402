"""Recorders of segments that see or change what runs in them, on top of a backend's or alone."""

from __future__ import annotations

from contextlib import ExitStack
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

    def begin(self) -> None:
        if self._inner is not None:
            self._inner.begin()
        for mode in self._modes:
            self._entered.enter_context(mode)

    def end(self) -> CapturedGraph:
        self._entered.close()
        return _Nothing() if self._inner is None else self._inner.end()

    def abandon(self) -> None:
        self._entered.close()
        if self._inner is not None:
            self._inner.abandon()
