"""What one call of an attached model was served from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mmgraph import Handle, Reason

Result = TypeVar("Result")


@dataclass(frozen=True)
class Served:
    """How the encoders of a model answered one call.

    Attributes:
        hits: Items from graphs.
        misses: Items in eager mode, by reason.
        calls: Calls of encoders.
    """

    hits: int
    misses: dict[Reason, int]
    calls: int

    @property
    def from_graphs(self) -> bool:
        """Whether there was something to do, and graphs did all of it."""
        return self.hits > 0 and not self.misses


def counted(handle: Handle, call: Callable[[], Result]) -> tuple[Result, Served]:
    """Return what `call` returns, and what it was served from."""
    before = handle.stats()
    result = call()
    after = handle.stats()
    misses = {
        reason: count - before.misses.get(reason, 0)
        for reason, count in after.misses.items()
        if count > before.misses.get(reason, 0)
    }
    return result, Served(after.hits - before.hits, misses, after.calls - before.calls)


def served(handle: Handle, call: Callable[[], Any]) -> Served:
    """What `call` was served from."""
    return counted(handle, call)[1]
