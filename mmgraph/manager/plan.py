"""Making plans: which items go to which replay, and the rest to eager mode with a reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from mmgraph.manager.planned import Eager, Graphs, Plan, Replay
from mmgraph.manager.prices import Measured, Prices
from mmgraph.policy import REPLAY, Bin, Packing, pack, segment_tier, seqlen_tier
from mmgraph.types import EncoderBatch, EncoderItemSpec, GraphKey, Reason

__all__ = ["JOINED_FROM", "Planner"]

JOINED_FROM = 4096
"""Tokens of budgets that have one graph for one item and for many.

On an H200 such a graph is 1 % slower for one image than one of its own at 4,096 patches and at
9,216. At 1,024 it is 5 % slower in Qwen2.5-VL and 14 % in Qwen3-VL: attention over one segment
doesn't fill the GPU there, and what does nothing for the others pushes it onto fewer processors.
"""
_REMEMBERED = 1024
_IN_PARTS = 4
"""Times the tokens of one replay, at which several cost too much where nothing is measured."""


class Planner:
    """Divides the items of calls over budgets.

    Args:
        budgets: Ascending token budgets.
        uniform: Whether segments of one length that fill a budget get a key of their own.
    """

    def __init__(self, budgets: tuple[int, ...], *, uniform: bool = False) -> None:
        self.budgets = budgets
        self._uniform = uniform
        self._measured: Measured | None = None
        self._known: dict[tuple[Hashable, tuple[int, ...]], Prices] = {}
        self._same: dict[Hashable, list[GraphKey]] = {}
        self._bounds: dict[Hashable, list[list[int]]] = {}
        self._chosen: dict[tuple[Hashable, ...], GraphKey | None] = {}
        self._alone: dict[tuple[Any, ...], Plan] = {}
        """Plans of calls of one item by the key that it needs."""
        self._own_keys: dict[tuple[EncoderItemSpec, Hashable, int], GraphKey | None] = {}
        self._open: dict[tuple[Hashable, ...], tuple[tuple[int, ...], list[GraphKey]]] = {}
        self._tables: tuple[dict[Any, Any], ...] = (
            self._known,
            self._same,
            self._bounds,
            self._chosen,
            self._alone,
            self._own_keys,
            self._open,
        )
        self._key_of = lru_cache(maxsize=_REMEMBERED)(GraphKey)

    def plan(self, batch: EncoderBatch, graphs: Graphs) -> Plan:
        """Divide the items of `batch`; replays may name keys that are still to be captured."""
        same = self._of_signature(batch.signature, graphs)
        prices = self._prices_for(batch, same, graphs.measured)
        budgets = self._budgets(batch, same, graphs)
        sizes = [item.num_tokens for item in batch.items]
        whole = self._whole(batch, budgets, sum(sizes))
        alike = (prices, budgets, whole, graphs.may_capture, graphs.general is None)
        plan = self._alone.get(alike)
        if plan is None:
            packing = pack(
                sizes,
                budgets,
                prices=prices.of_budgets(budgets),
                own=self._own(batch, same, prices),
                whole=self._cost_of_whole(batch, whole, prices),
            )
            plan = self._replays(batch, packing, same, graphs, prices)
            if len(sizes) == 1 and whole and packing.bins == whole[:1] and plan.replays:
                self._alone[alike] = plan
        if not plan.eager and plan.replays:
            tokens = [sum([sizes[i] for i in replay.items]) for replay in plan.replays]
            keys = [replay.key for replay in plan.replays]
            if prices.eager_is_cheaper(keys, tokens, _squares(batch, plan.replays)):
                return Plan((), (Eager(tuple(range(len(sizes))), Reason.NOT_FASTER),))
        return plan

    def _replays(
        self,
        batch: EncoderBatch,
        packing: Packing,
        same: Sequence[GraphKey],
        graphs: Graphs,
        prices: Prices,
    ) -> Plan:
        """A plan with a graph for each bin, as far as there is one."""
        replays: list[Replay] = []
        eager: list[Eager] = []
        for bin_ in packing.bins:
            key = self._chosen_for(batch, bin_, same, graphs)
            if key is not None:
                replays.append(Replay(bin_.items, key))
                continue
            parts = self._in_parts(batch, bin_.items, same, replace(graphs, may_capture=False))
            tokens = sum([batch.items[i].num_tokens for i in bin_.items])
            squares = _squares(batch, parts)
            in_eager = bool(packing.oversized)
            if parts and _are_worth(parts, tokens, squares, prices, in_eager=in_eager):
                replays.extend(parts)
            else:
                eager.append(Eager(bin_.items, self._reason(self.key_for(batch, bin_), graphs)))
        eager.extend(
            Eager((i,), self._oversized_reason(batch.items[i].num_tokens, graphs))
            for i in packing.oversized
        )
        return Plan(tuple(replays), _merge(eager))

    def _chosen_for(
        self, batch: EncoderBatch, bin_: Bin, same: Sequence[GraphKey], graphs: Graphs
    ) -> GraphKey | None:
        """The graph for a bin, if there is one or may be."""
        exact = self.key_for(batch, bin_)
        chosen = (exact, graphs.may_capture, graphs.general is None, self.budgets)
        if chosen not in self._chosen:
            self._chosen[chosen] = self._choose(exact, same, graphs)
        return self._chosen[chosen]

    def _in_parts(
        self, batch: EncoderBatch, items: tuple[int, ...], same: Sequence[GraphKey], graphs: Graphs
    ) -> list[Replay]:
        """Replays of graphs that there are for halves of a bin, or halves of these.

        Not one if a single item has none: eager mode has to run then anyway.
        """
        budgets = sorted({key.token_budget for key in same})
        replays = list[Replay]()
        middle = len(items) // 2
        for part in (items[:middle], items[middle:]) if middle else ():
            position = bisect_left(budgets, sum(batch.items[i].num_tokens for i in part))
            key = None
            if position < len(budgets):
                key = self._chosen_for(batch, Bin(part, budgets[position]), same, graphs)
            more = [Replay(part, key)] if key else self._in_parts(batch, part, same, graphs)
            if not more:
                return []
            replays.extend(more)
        return replays

    def _reason(self, exact: GraphKey, graphs: Graphs) -> Reason:
        """Why there is no graph for at least `exact`."""
        wanted = graphs.wanted(exact)
        return graphs.failed.get(exact, graphs.failed.get(wanted, graphs.missing))

    def key_for(self, batch: EncoderBatch, bin_: Bin, *, for_any: bool = False) -> GraphKey:
        """The tightest key for the items of `bin_`; `for_any` batch with that many tokens."""
        items, budget = [batch.items[i] for i in bin_.items], bin_.budget
        counts, lengths = _segments(items)
        capacity = [segment_tier(n) for n in counts]
        longest = [seqlen_tier(max(kind), budget) for kind in lengths]
        uniform: list[bool] = []
        # Full attention comes first; windows alone aren't worth it.
        if self._uniform and not for_any and counts and _fill(counts[0], lengths[0], budget):
            uniform = [_fill(n, kind, budget) for n, kind in zip(counts, lengths, strict=True)]
            for i in [i for i, same in enumerate(uniform) if same]:
                capacity[i], longest[i] = counts[i], lengths[i][0]
        bounds = (tuple(capacity), tuple(longest))
        return self._key_of(budget, *bounds, batch.signature, None, tuple(uniform))

    def own_key(self, item: EncoderItemSpec, signature: Hashable) -> GraphKey | None:
        """The key for exactly one item with dense attention; ``None`` where there can't be one."""
        known = (item, signature, self.budgets[-1])
        if known not in self._own_keys:
            key = None
            if self._uniform and 0 < item.num_tokens <= self.budgets[-1]:
                batch = EncoderBatch((item,), signature)
                key = self.key_for(batch, Bin((0,), item.num_tokens))
            self._own_keys[known] = key if key is not None and key.uniform else None
        return self._own_keys[known]

    def _budgets(
        self, batch: EncoderBatch, same: Sequence[GraphKey], graphs: Graphs
    ) -> tuple[int, ...]:
        """Budgets that items may go to: what may be captured, and what is."""
        kind = (batch.signature, graphs.may_capture, self.budgets)
        known = self._open.get(kind)
        if known is None:
            budgets = self.budgets
            if not graphs.may_capture:
                budgets = tuple(sorted({key.token_budget for key in same if not key.uniform}))
            others = [key for key in same if key.token_budget not in budgets]
            known = self._open[kind] = budgets, others
        budgets, others = known
        if not others or not batch.items:
            return budgets
        # Graphs of exactly some tokens, where they take whatever part of the batch goes there.
        items, total = tuple(range(len(batch.items))), sum([i.num_tokens for i in batch.items])
        more = {
            key.token_budget
            for key in others
            if (not key.uniform or key.token_budget == total)
            and key.covers(self.key_for(batch, Bin(items, key.token_budget)))
        }
        return tuple(sorted({*budgets, *more})) if more else budgets

    def _of_signature(self, signature: Hashable, graphs: Graphs) -> list[GraphKey]:
        """Keys of the graphs for calls of `signature`.

        What is remembered stays as long as there are the same graphs and nothing more is measured.
        """
        if graphs.measured is not self._measured or max(map(len, self._tables)) > _REMEMBERED:
            self._measured = graphs.measured
            for table in self._tables:
                table.clear()
        if signature not in self._same:
            same = [k for k in graphs.captured if k.signature == signature]
            self._same[signature] = same
            kinds = zip(*(key.max_seqlen for key in same), strict=True)
            self._bounds[signature] = [sorted({*kind}) for kind in kinds]
        return self._same[signature]

    def _prices_for(
        self, batch: EncoderBatch, same: Sequence[GraphKey], measured: Measured
    ) -> Prices:
        """Prices for batches like this one: those that the same graphs take are alike."""
        longest = [max(kind) for kind in _segments(batch.items)[1]]
        bounds = self._bounds[batch.signature]
        kind = (batch.signature, tuple(map(bisect_left, bounds, longest)))
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = Prices(batch.signature, longest, same, measured)
        return known

    def _whole(
        self, batch: EncoderBatch, budgets: tuple[int, ...], total: int
    ) -> tuple[Bin, GraphKey] | None:
        """One replay of the whole batch, and the tightest key for it, where a budget holds it."""
        position = bisect_left(budgets, total)
        if position == len(budgets) or not batch.items:
            return None
        bin_ = Bin(tuple(range(len(batch.items))), budgets[position])
        return bin_, self.key_for(batch, bin_)

    def _cost_of_whole(
        self, batch: EncoderBatch, whole: tuple[Bin, GraphKey] | None, prices: Prices
    ) -> float | None:
        """What one replay of the whole batch costs, if its very graph was measured."""
        if whole is None or not prices.are_measured:
            return None
        return prices.of_graph(whole[1], sum([item.squares for item in batch.items]))

    def _own(
        self, batch: EncoderBatch, same: Sequence[GraphKey], prices: Prices
    ) -> Sequence[float]:
        """What each of several items costs in a graph of exactly its tokens, if there are any."""
        exact = {key for key in same if key.uniform and len(batch.items) > 1}
        costs = [inf] * len(batch.items)
        for i, item in enumerate(batch.items) if exact else ():
            key = self.own_key(item, batch.signature)
            cost = prices.of_graph(key, item.squares) if key in exact else None
            costs[i] = inf if cost is None else cost
        return costs if min(costs, default=inf) < inf else ()

    def _choose(
        self, exact: GraphKey, captured: Sequence[GraphKey], graphs: Graphs
    ) -> GraphKey | None:
        """The graph for a replay of at least `exact`: one that there is, or one to capture."""
        if exact in graphs.captured:
            return exact
        least = exact.token_budget
        covering = [k for k in captured if k.token_budget >= least and k.covers(exact)]
        seconds = graphs.measured.replays
        best = min(
            covering,
            key=lambda k: (seconds.get(k, 0.0), *_bounds(k)),
            default=None,
        )
        near = [key for key in covering if _near(key, exact)]
        if graphs.general is not None:  # what takes it is near enough
            near = [key for key in covering if key.token_budget == least]
        if best is not None and (near or exact.token_budget not in self.budgets):
            return best
        wanted = graphs.wanted(exact)
        if graphs.may_capture and wanted not in graphs.failed:
            return wanted
        return best

    def _oversized_reason(self, num_tokens: int, graphs: Graphs) -> Reason:
        return graphs.missing if num_tokens <= self.budgets[-1] else Reason.ABOVE_BUDGET


def _squares(batch: EncoderBatch, replays: Sequence[Replay]) -> list[int]:
    """What each of `replays` would hold of ``EncoderItemSpec.squares``."""
    return [sum([batch.items[i].squares for i in replay.items]) for replay in replays]


def _are_worth(
    parts: Sequence[Replay], tokens: int, squares: Sequence[int], prices: Prices, *, in_eager: bool
) -> bool:
    """Whether several replays may be cheaper than eager mode for a bin of `tokens`.

    Where eager mode runs `in_eager` anyway they have to be cheaper than what the bin adds to it.
    Else the plan as a whole is compared with eager mode, if that was measured.
    """
    keys = [replay.key for replay in parts]
    replays = prices.of_replays(keys, squares)
    eager, least = prices.of_eager(tokens), prices.of_eager(0)
    if replays is None or eager is None or least is None:
        spent = sum(REPLAY(key.token_budget) for key in keys)
        return spent <= _IN_PARTS * REPLAY(tokens)
    return not in_eager or replays < eager - least


def _segments(items: Sequence[EncoderItemSpec]) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """How many segments `items` have together, and the longest of each, by kind of attention."""
    if len(items) == 1:  # most calls
        return items[0].num_segments, [(longest,) for longest in items[0].max_seqlen]
    counts = list(map(sum, zip(*[item.num_segments for item in items], strict=True)))
    return counts, list(zip(*[item.max_seqlen for item in items], strict=True))


def _fill(count: int, lengths: Sequence[int], budget: int) -> bool:
    """Whether `count` segments are all of one length, and as long as `budget` together."""
    return count * lengths[0] == budget and min(lengths) == max(lengths)


def _bounds(key: GraphKey) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Sorts keys, the tightest first."""
    return key.token_budget, key.max_seqlen, key.segment_capacity


def _near(key: GraphKey, exact: GraphKey) -> bool:
    """Whether a looser graph is close enough that one of its own isn't worth a capture."""
    # Full attention comes first; empty segments of it cost next to nothing in a large graph.
    first = 1 if exact.token_budget >= JOINED_FROM else 0
    bounds = zip(
        (*key.segment_capacity[first:], *key.max_seqlen),
        (*exact.segment_capacity[first:], *exact.max_seqlen),
        strict=True,
    )
    return key.token_budget == exact.token_budget and all(a <= 2 * b for a, b in bounds)


def _merge(eager: list[Eager]) -> tuple[Eager, ...]:
    """One entry a reason, its items ascending."""
    by_reason: dict[Reason, list[int]] = {}
    for part in eager:
        by_reason.setdefault(part.reason, []).extend(part.items)
    return tuple(Eager(tuple(sorted(items)), reason) for reason, items in by_reason.items())
