"""Plans: which items go to which replay, and the rest to eager mode with a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mmgraph.policy import Bin, pack, segment_tier, seqlen_tier
from mmgraph.types import EncoderBatch, GraphKey, Reason

__all__ = ["Eager", "Plan", "Planner", "Replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """Items served by one replay of the graph of `key`."""

    items: tuple[int, ...]
    key: GraphKey


@dataclass(frozen=True, slots=True)
class Eager:
    """Items that run in eager mode."""

    items: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to each item of a call; every item occurs once."""

    replays: tuple[Replay, ...]
    eager: tuple[Eager, ...]


@dataclass(frozen=True, slots=True)
class Graphs:
    """What the planner may count on.

    Attributes:
        captured: Keys of the graphs there are.
        failed: Keys that can't be captured, and why.
        may_capture: Whether a plan may ask for a key that isn't captured yet.
        missing: The reason for eager mode where a key is missing.
    """

    captured: Collection[GraphKey]
    failed: Mapping[GraphKey, Reason]
    may_capture: bool
    missing: Reason = Reason.NOT_CAPTURED


class Planner:
    """Divides the items of calls over budgets.

    Args:
        budgets: Ascending token budgets.
    """

    def __init__(self, budgets: tuple[int, ...]) -> None:
        self.budgets = budgets

    def plan(self, batch: EncoderBatch, graphs: Graphs) -> Plan:
        """Divide the items of `batch`; replays may name keys that are still to be captured."""
        same = [key for key in graphs.captured if key.signature == batch.signature]
        budgets = (
            self.budgets if graphs.may_capture else tuple(sorted({k.token_budget for k in same}))
        )
        packing = pack([item.num_tokens for item in batch.items], budgets)
        replays: list[Replay] = []
        eager: list[Eager] = []
        for bin_ in packing.bins:
            exact = self.key_for(batch, bin_)
            key = _choose(exact, same, graphs)
            if key is None:
                eager.append(Eager(bin_.items, graphs.failed.get(exact, graphs.missing)))
            else:
                replays.append(Replay(bin_.items, key))
        eager.extend(
            Eager((i,), self._oversized_reason(batch.items[i].num_tokens, graphs))
            for i in packing.oversized
        )
        return Plan(tuple(replays), _merge(eager))

    def key_for(self, batch: EncoderBatch, bin_: Bin) -> GraphKey:
        """The tightest key for the items of `bin_`."""
        items = [batch.items[i] for i in bin_.items]
        counts = zip(*(item.num_segments for item in items), strict=True)
        lengths = zip(*(item.max_seqlen for item in items), strict=True)
        return GraphKey(
            token_budget=bin_.budget,
            segment_capacity=tuple(segment_tier(sum(kind)) for kind in counts),
            max_seqlen=tuple(seqlen_tier(max(kind), bin_.budget) for kind in lengths),
            signature=batch.signature,
        )

    def _oversized_reason(self, num_tokens: int, graphs: Graphs) -> Reason:
        return graphs.missing if num_tokens <= self.budgets[-1] else Reason.ABOVE_BUDGET


def _choose(exact: GraphKey, captured: list[GraphKey], graphs: Graphs) -> GraphKey | None:
    if exact in graphs.captured:
        return exact
    covering = [key for key in captured if key.covers(exact)]
    best = min(
        covering, key=lambda k: (k.token_budget, k.max_seqlen, k.segment_capacity), default=None
    )
    if best is not None and _near(best, exact):
        return best
    if graphs.may_capture and exact not in graphs.failed:
        return exact
    return best


def _near(key: GraphKey, exact: GraphKey) -> bool:
    """Whether a looser graph is close enough that one of its own isn't worth a capture."""
    bounds = zip(
        (*key.segment_capacity, *key.max_seqlen),
        (*exact.segment_capacity, *exact.max_seqlen),
        strict=True,
    )
    return key.token_budget == exact.token_budget and all(a <= 2 * b for a, b in bounds)


def _merge(eager: list[Eager]) -> tuple[Eager, ...]:
    """One entry a reason, its items ascending."""
    by_reason: dict[Reason, list[int]] = {}
    for part in eager:
        by_reason.setdefault(part.reason, []).extend(part.items)
    return tuple(Eager(tuple(sorted(items)), reason) for reason, items in by_reason.items())
