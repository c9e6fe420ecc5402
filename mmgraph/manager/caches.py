"""Caches that captures have to themselves, for encoders that have some."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from mmgraph.protocol import SupportsPrivateCaches

__all__ = ["private_caches"]


def private_caches(model: object) -> AbstractContextManager[object]:
    """``model.private_caches()`` where it is there; its value must live as long as the graph."""
    if isinstance(model, SupportsPrivateCaches):
        return model.private_caches()
    return nullcontext()
