"""Environment variables that mmgraph reads, each on every use so that tests can set them."""

from __future__ import annotations

import os

__all__ = ["debug_enabled", "gc_during_capture", "nvtx_enabled"]

_TRUE = frozenset({"1", "true", "yes", "on"})


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE


def gc_during_capture() -> bool:
    """``MMGRAPH_ENABLE_CUDAGRAPH_GC=1`` leaves the garbage collector running during captures."""
    return _flag("MMGRAPH_ENABLE_CUDAGRAPH_GC")


def debug_enabled() -> bool:
    """``MMGRAPH_DEBUG=1`` checks at each replay that no buffer moved and outputs are copies."""
    return _flag("MMGRAPH_DEBUG")


def nvtx_enabled() -> bool:
    """``MMGRAPH_NVTX=1`` marks captures, replays and eager calls in the timeline of Nsight."""
    return _flag("MMGRAPH_NVTX")
