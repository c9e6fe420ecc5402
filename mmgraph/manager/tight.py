"""Graphs of exactly some tokens, for batches and items that come again and again.

A batch that keeps coming, a camera's image for example, needn't pay for the padding of a budget for
ever, and an item that comes in ever new company may be served by itself. Half of the graphs are
left to the budgets, which serve everything else. Once the other half is used up, a graph makes
room for another of its kind that is asked for clearly more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from mmgraph.config import GraphConfig
from mmgraph.manager.demand import Demand
from mmgraph.manager.known import Known
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Plan, Replay
from mmgraph.manager.prices import Measured, Savings, in_eager, saving
from mmgraph.manager.store import GraphStore
from mmgraph.policy import Bin
from mmgraph.types import EncoderBatch, GraphKey, Reason

__all__ = ["TightGraphs"]

_TOLERATED_PADDING = 0.04
_WORTH = 0.02
"""Of its own time, what a graph of exactly one item has to save at least."""
_PATIENCE = 4
"""Times ``exact_after``: uses after which it is asked again whether another graph gives way."""
_STEADY = 32
"""Calls for which the least useful graph is taken to stay it."""


class TightGraphs:
    """Says which of them there are to be; used under the manager's lock.

    Args:
        config: What the user wants.
        planner: Divides batches over budgets.
        store: Holds the graphs.
        demand: How much each graph is asked for.
        savings: What a use of each saves.
        capture: Captures a key when the graphs of others are freed.
        is_open: Whether anything may be captured now.
    """

    def __init__(
        self,
        config: GraphConfig,
        planner: Planner,
        store: GraphStore,
        demand: Demand,
        savings: Savings,
        capture: Callable[[GraphKey, Sequence[GraphKey]], None],
        is_open: Callable[[], bool],
    ) -> None:
        self._after = config.exact_after
        self._most = config.max_graphs
        self._planner = planner
        self._store = store
        self._demand = demand
        self._savings = savings
        self._capture = capture
        self._is_open = is_open
        self._least: tuple[int, Measured, GraphKey | None] | None = None

    def is_due(self, uses: int, known: Known | None = None) -> bool:
        """Whether a graph for a batch that comes for the `uses`-th time is to be tried now."""
        return 0 < self._after <= uses and (known is None or known.again <= uses)

    def tried(self, batch: EncoderBatch, known: Known) -> Known:
        """What is known of `batch` once a graph of exactly its tokens was tried."""
        plan, wish = self._tightened(batch, known.plan)
        again = inf if wish is None else known.uses + _PATIENCE * self._after
        waiting = known.waiting if plan is known.plan else ()
        return Known(plan, known.uses, waiting, again, wish)

    def _tightened(self, batch: EncoderBatch, plan: Plan) -> tuple[Plan, GraphKey | None]:
        """One replay of exactly the tokens of `batch` where that is faster than `plan`.

        And the key that there is no room for, where a graph of the kind may give way some day.
        """
        tokens = sum(item.num_tokens for item in batch.items)
        spent = sum(replay.key.token_budget for replay in plan.replays)
        padded = not plan.replays or spent - tokens > _TOLERATED_PADDING * spent
        by_choice = all(part.reason is Reason.NOT_FASTER for part in plan.eager)
        if not (by_choice and self._is_open() and tokens <= self._planner.budgets[-1]):
            return plan, None
        items = tuple(range(len(batch.items)))
        key = self._planner.key_for(batch, Bin(items, tokens))
        tighter = padded or (key.uniform and plan.replays != (Replay(items, key),))
        if not tighter or key in self._store.failed:
            return plan, None
        if key not in self._store.entries:
            victims = self._victims(key, {replay.key for replay in plan.replays})
            if victims is None:
                return plan, key if self._graphs() else None
            self._capture(key, victims)
        if key not in self._store.entries or not self._is_faster(key, plan, batch):
            return plan, None
        return Plan((Replay(items, key),), ()), None

    def _victims(
        self, key: GraphKey, in_use: Collection[GraphKey] = ()
    ) -> Sequence[GraphKey] | None:
        """Graphs to free for one of `key`; ``None`` if there is no room for it.

        None is freed for its memory: on a GPU the pool would keep that.
        """
        if not self._store.has_room(key):
            return None
        graphs = self._graphs()
        if 2 * len(graphs) < self._most and len(self._store.entries) < self._most:
            return ()
        if not self._demand.wanted(key, self._after):
            return None
        victim = self._least_useful(graphs)
        if victim is None or victim in in_use or victim not in self._store.entries:
            return None
        more = self._demand.is_clearly_more(key, victim, self._savings)
        return (victim,) if more else None

    def _least_useful(self, graphs: Sequence[GraphKey]) -> GraphKey | None:
        """One of `graphs`; which it is is asked again after some calls, or when others came."""
        now = (self._demand.calls // _STEADY, self._store.measured)
        if self._least is None or self._least[0] != now[0] or self._least[1] is not now[1]:
            least = min(
                graphs,
                key=lambda graph: self._demand.of(graph) * self._savings(graph),
                default=None,
            )
            self._least = (*now, least)
        return self._least[2]

    def _graphs(self) -> list[GraphKey]:
        """Those that there are."""
        budgets = self._planner.budgets
        return [key for key in self._store.entries if key.token_budget not in budgets]

    def wish(self, batch: EncoderBatch) -> None:
        """Count the items of a batch of several that come in a company that is new.

        Those that have a graph as well: wishes are held against them.
        """
        for key in self._keys_of_items(batch):
            self._demand.add(key)

    def recurring(self, batch: EncoderBatch, *, counted: bool) -> list[GraphKey]:
        """Graphs to capture for single items of `batch`, since these came often enough by now.

        Args:
            batch: Of several items.
            counted: Whether this time is counted already.
        """
        keys = self._keys_of_items(batch)
        return [
            key
            for key in keys
            if key not in self._store.entries
            and self._demand.wanted(key, self._after, not counted)
            and self._victims(key, keys) is not None
        ]

    def _keys_of_items(self, batch: EncoderBatch) -> list[GraphKey]:
        """Keys of exactly one item of a batch of several.

        An item that fills a budget has one anyway.
        """
        if len(batch.items) < 2 or not (self._after and self._is_open()):
            return []
        failed, budgets = self._store.failed, self._planner.budgets
        keys = dict.fromkeys(
            self._planner.own_key(item, batch.signature)
            for item in batch.items
            if item.num_tokens not in budgets
        )
        return [key for key in keys if key is not None and key not in failed]

    def capture_items(self, batch: EncoderBatch) -> None:
        """Capture graphs of exactly one item each for those of `batch` that came often enough.

        One is kept where no other graph serves its item as fast.
        """
        for key in self.recurring(batch, counted=True):
            victims = self._victims(key, self._keys_of_items(batch))
            if victims is None:  # another one of the call took the room
                continue
            self._capture(key, victims)
            seconds = self._store.measured.replays.get(key)
            if seconds is not None and saving(key, self._store.measured) < _WORTH * seconds:
                self._store.drop(key, Reason.NOT_FASTER)

    def _is_faster(self, key: GraphKey, plan: Plan, batch: EncoderBatch) -> bool:
        store = self._store
        if not store.backend.is_timed:
            return True
        if plan.replays:
            limit = sum(self._seconds(replay, batch) for replay in plan.replays)
        else:
            limit = in_eager(key, key.token_budget, store.measured) or 0.0
        if self._seconds(Replay(tuple(range(len(batch.items))), key), batch) < limit:
            return True
        store.drop(key, Reason.NOT_FASTER)
        return False

    def _seconds(self, replay: Replay, batch: EncoderBatch) -> float:
        """What a replay takes now for its part of `batch`."""
        seconds, measured = self._store.seconds(replay.key), self._store.measured
        held = sum(batch.items[i].squares for i in replay.items)
        full, part = measured.replay(replay.key), measured.replay(replay.key, held)
        return seconds * part / full if full and part else seconds
