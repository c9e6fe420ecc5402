"""Plans as engines usually make them: powers of two, and the worst that may come baked in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mmgraph import GraphKey, Handle
from mmgraph.bench.power_of_two import fill
from mmgraph.manager import Plan, Replay
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Eager, Graphs
from mmgraph.types import EncoderBatch, Reason

__all__ = ["UsualPlanner", "plan_as_usual", "plan_only", "usual_planner"]


class UsualPlanner(Planner):
    """One graph a budget that takes any items, and items put together first come first served.

    Args:
        budgets: Ascending budgets in tokens.
        segments: Segments of each kind that a token may bring, at most.
        longest: Longest segment of each kind, ``None`` for as long as the budget.
    """

    def __init__(
        self,
        budgets: tuple[int, ...],
        segments: Sequence[float],
        longest: Sequence[int | None],
    ) -> None:
        super().__init__(budgets)
        self._segments, self._longest = segments, longest

    def plan(self, batch: EncoderBatch, graphs: Graphs) -> Plan:
        sizes = [item.num_tokens for item in batch.items]
        fitting = [i for i, size in enumerate(sizes) if size <= self.budgets[-1]]
        above = tuple(i for i, size in enumerate(sizes) if size > self.budgets[-1])
        replays = tuple(
            Replay(tuple(sorted(fitting[i] for i in part.items)), self._key(batch, part.budget))
            for part in fill([sizes[i] for i in fitting], self.budgets)
        )
        return Plan(replays, (Eager(above, Reason.ABOVE_BUDGET),) if above else ())

    def _key(self, batch: EncoderBatch, budget: int) -> GraphKey:
        capacity = tuple(max(1, int(budget * share + 1)) for share in self._segments)
        longest = tuple(budget if n is None else min(n, budget) for n in self._longest)
        return GraphKey(budget, capacity, longest, batch.signature)


def plan_as_usual(
    handle: Handle, budgets: tuple[int, ...], calls: Iterable[Mapping[str, torch.Tensor]]
) -> None:
    """Make attached encoders plan so, with the worst that comes in any of these calls baked in."""
    calls = list(calls)
    for manager in handle._managers():
        planner = usual_planner(budgets, map(manager.model.item_specs, calls))
        manager._planner = manager._plans._planner = planner


def usual_planner(budgets: tuple[int, ...], batches: Iterable[EncoderBatch]) -> UsualPlanner:
    """One with the worst baked in that comes in any of these batches."""
    specs = [item for batch in batches for item in batch.items]
    each = range(len(specs[0].num_segments))
    segments = [max(s.num_segments[k] / s.num_tokens for s in specs) for k in each]
    longest = [None if k == 0 else max(s.max_seqlen[k] for s in specs) for k in each]
    return UsualPlanner(budgets, segments, longest)


def plan_only(handle: Handle, call: Mapping[str, torch.Tensor]) -> None:
    """Plan a call in attached encoders, and capture budgets' graphs for it, but compute nothing.

    Graphs of exact calls, for what no budget holds, come with the calls themselves.
    """
    for manager in handle._managers():
        with manager._lock:
            manager._plans.plan(manager.model.item_specs(call))
