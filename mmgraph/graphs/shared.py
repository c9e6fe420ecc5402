"""What captures on a CUDA device share: memory pools, and streams to capture on."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["CaptureStreams", "Pool"]


class Pool:
    """A memory pool and the number of graphs in it."""

    def __init__(self, handle: Any, *, borrowed: bool = False) -> None:
        self.handle = handle
        self._borrowed = borrowed
        self._live = 0
        self._used = False

    @property
    def is_dead(self) -> bool:
        """Whether its last graph is gone; a borrowed pool is its owner's to keep alive."""
        return self._used and self._live == 0 and not self._borrowed

    def opened(self) -> None:
        self._live += 1
        self._used = True

    def closed(self) -> None:
        self._live -= 1


class CaptureStreams:
    """Streams to capture on that no graph needs, by device."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            free = self._free.get(device)
            return free.pop() if free else torch.cuda.Stream(device)

    def give_back(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._free.setdefault(stream.device, []).append(stream)
