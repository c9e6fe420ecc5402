"""Named ranges in the timeline of Nsight Systems, if ``MMGRAPH_NVTX=1`` asks for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from mmgraph.env import nvtx_enabled

__all__ = ["Ranges"]

_NOTHING = nullcontext()


class Ranges:
    """Marks what an encoder does; costs a call where it isn't asked for.

    Args:
        name: Name of the encoder.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._enabled = nvtx_enabled() and torch.cuda.is_available()

    def __call__(self, what: str, which: object = "") -> AbstractContextManager[None]:
        """A range for doing `what`, to `which` graph or for which reason."""
        if not self._enabled:
            return _NOTHING
        return torch.cuda.nvtx.range(f"mmgraph {what} {self._name}: {which}")
