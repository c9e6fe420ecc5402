"""What a graph backend is: capture a callable on static buffers, replay it, own a memory pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["CapturedGraph", "GraphBackend", "Runnable"]

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
    """Captures graphs on one device. All graphs of one backend share one memory pool."""

    name: str

    @abstractmethod
    def capture(self, run: Runnable, buffers: Mapping[str, torch.Tensor]) -> CapturedGraph:
        """Warm `run` up on `buffers`, then record one call of it.

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
    def busy(self) -> bool:
        """Whether somebody else is recording on the current stream, so that nothing may start."""
