"""Regions of a call that folding needn't see: there it may run code in which nothing can be seen.

Folding (see ``folding.py``) looks at every operation of a call, so compiled code would hide them.
But most of a tower is blocks in which there is nothing to fold. Such a block is a region: it says
that it may run one way or the other (:func:`in_region`). The observed run takes the plain way and
notes what the block does; if it touches nothing but its device, draws no random numbers and writes
to no memory but its own, the recording takes the fast way there and leaves its operations out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs.folding import Folding
from mmgraph.graphs.operations import Step
from mmgraph.graphs.trees import storage_of

__all__ = ["Regions", "in_region"]

_Way = Callable[..., Any]


@dataclass(frozen=True)
class _Region:
    """Where a block lies in the steps of the observed run.

    Attributes:
        start: Its first step.
        end: The first step after it.
        may_hide: Whether folding needn't see it.
        constants: What it reads of that which is the same in each replay.
    """

    start: int = 0
    end: int = 0
    may_hide: bool = False
    constants: Sequence[torch.Tensor] = field(default_factory=tuple)


class Regions:
    """The regions of one call in the order in which they are met."""

    def __init__(self, folding: Folding) -> None:
        self._folding = folding
        self._regions: list[_Region] = []
        self._next = 0
        self._is_known = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block blocks ask here which way to run."""
        token = _open.set(self)
        try:
            yield
        finally:
            _open.reset(token)

    def observe(self) -> None:
        """The run that is observed begins."""
        self._regions.clear()

    @property
    def num_fast(self) -> int:
        """Regions that are recorded the fast way."""
        return sum(region.may_hide for region in self._regions)

    def follow(self) -> None:
        """A run begins that follows the one that was observed."""
        self._is_known = True
        self._next = 0

    def run(self, plain: _Way, fast: _Way, args: Any, kwargs: Any) -> Any:
        """What :func:`in_region` does."""
        if not self._is_known:
            return self._observed(plain, args, kwargs)
        if self._next >= len(self._regions):
            raise CaptureError("two runs of the same call differ: the second has more blocks")
        region = self._regions[self._next]
        self._next += 1
        if not region.may_hide:
            return plain(*args, **kwargs)
        with self._folding.hidden(region.start, region.end, region.constants):
            return fast(*args, **kwargs)

    def _observed(self, plain: _Way, args: Any, kwargs: Any) -> Any:
        folding = self._folding
        place = len(self._regions)
        self._regions.append(_Region())  # as it stays inside a break, or around another region
        if not folding.is_observing:
            return plain(*args, **kwargs)
        start, breaks = len(folding.steps), folding.num_breaks
        out = plain(*args, **kwargs)
        steps = folding.steps[start:]
        whole = breaks == folding.num_breaks and len(self._regions) == place + 1
        if not whole or any(step.on_host for step in steps) or not _keeps_to_itself(steps):
            return out
        constants = {id(t): t for step in steps for t in step.reads}
        self._regions[place] = _Region(start, len(folding.steps), True, tuple(constants.values()))
        # The region runs for real: what it makes, and what it reads, must not be folded where it is
        # written afterwards.
        made = {storage for step in steps for storage in step.makes}
        folding.have_read(made | {storage_of(t) for t in constants.values()})
        return out


def _keeps_to_itself(steps: Sequence[Step]) -> bool:
    """Whether no step writes to memory that was there before them."""
    born: set[int] = set()
    for step in steps:
        if not step.writes <= born:
            return False
        born |= step.makes
    return True


_open: ContextVar[Regions | None] = ContextVar("mmgraph_regions", default=None)


def in_region(plain: _Way, fast: _Way, args: Any, kwargs: Any) -> Any:
    """Call `fast`, or `plain`, which does the same, where folding has to see what it does."""
    regions = _open.get()
    if regions is None:
        return fast(*args, **kwargs)
    return regions.run(plain, fast, args, kwargs)
