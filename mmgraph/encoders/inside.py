"""Whether mmgraph itself runs a tower, so that what is attached to it passes calls through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["eager_towers", "inside_tower"]

_inside: ContextVar[bool] = ContextVar("mmgraph_inside_tower", default=False)


def inside_tower() -> bool:
    """Whether a tower is being run by mmgraph, so that wrapped methods in it pass through."""
    return _inside.get()


@contextmanager
def eager_towers() -> Iterator[None]:
    """Within the block attached towers run in eager mode, uncounted."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)
