"""Plans that were made, by batch, and how often each batch came."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mmgraph.manager.planned import Plan
from mmgraph.types import EncoderBatch, GraphKey

__all__ = ["Known", "KnownPlans"]

_REMEMBERED = 256
_COUNTED = 2048


@dataclass
class Known:
    """A plan that was made.

    Attributes:
        plan: The plan.
        uses: How often the batch came.
        waiting: Keys that would be captured if they were asked for more often, or had room.
        again: Uses from which on a graph of exactly its tokens is tried, from ``exact_after`` on.
        wish: The key of such a graph, if it would be captured if there was room.
    """

    plan: Plan
    uses: int
    waiting: tuple[GraphKey, ...] = ()
    again: float = 0
    wish: GraphKey | None = None


class KnownPlans:
    """The last few plans, and the counts of some more batches: they outlive their plans."""

    def __init__(self) -> None:
        self._plans: OrderedDict[EncoderBatch, Known] = OrderedDict()
        self._uses: OrderedDict[EncoderBatch, int] = OrderedDict()
        """Of batches without a plan."""

    def __len__(self) -> int:
        return len(self._plans)

    def __getitem__(self, batch: EncoderBatch) -> Known:
        return self._plans[batch]

    def __setitem__(self, batch: EncoderBatch, known: Known) -> None:
        self._plans[batch] = known
        self._uses.pop(batch, None)
        if len(self._plans) > _REMEMBERED:
            self._count(*self._plans.popitem(last=False))

    def get(self, batch: EncoderBatch) -> Known | None:
        """What is known of a batch, ``None`` if it has no plan."""
        return self._plans.get(batch)

    def uses(self, batch: EncoderBatch) -> int:
        """How often a batch came whose plan was forgotten."""
        return self._uses.get(batch, 0)

    def forget(self) -> None:
        """Forget the plans, and keep the counts."""
        for known in self._plans.items():
            self._count(*known)
        self._plans.clear()

    def clear(self) -> None:
        """Forget the counts as well."""
        self._plans.clear()
        self._uses.clear()

    def _count(self, batch: EncoderBatch, known: Known) -> None:
        self._uses[batch] = known.uses
        if len(self._uses) > _COUNTED:
            self._uses.popitem(last=False)
