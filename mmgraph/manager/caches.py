"""Caches that captures have to themselves, for encoders that have some."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from mmgraph.protocol import SupportsNumBytes, SupportsPrivateCaches

__all__ = ["private_caches"]


class _Nothing:
    num_bytes = 0


def private_caches(model: object) -> AbstractContextManager[SupportsNumBytes]:
    """``model.private_caches()`` where it is there; its value must live as long as the graph."""
    if isinstance(model, SupportsPrivateCaches):
        return model.private_caches()
    return nullcontext(_Nothing())
