"""The plans of calls that came before, and the captures that new ones ask for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from mmgraph.config import GraphConfig
from mmgraph.manager.plan import Graphs, Plan, Planner, Replay
from mmgraph.manager.store import GraphStore
from mmgraph.policy import Bin
from mmgraph.types import EncoderBatch, GraphKey, Reason

__all__ = ["Plans"]

_REMEMBERED = 256
_TOLERATED_PADDING = 0.04


@dataclass
class _Known:
    plan: Plan
    uses: int


class Plans:
    """Plans by batch; used under the manager's lock.

    A batch that comes again and again, a camera's image for example, needn't pay for the padding of
    a budget for ever: it gets a graph of exactly its tokens, if that is faster.

    Args:
        config: What the user wants.
        planner: Divides batches over budgets.
        store: Holds the graphs.
        captured: Called after each capture.
    """

    def __init__(
        self, config: GraphConfig, planner: Planner, store: GraphStore, captured: Callable[[], None]
    ) -> None:
        self.lazy = config.capture == "lazy"
        self._config = config
        self._planner = planner
        self._store = store
        self._captured = captured
        self._known: OrderedDict[EncoderBatch, _Known] = OrderedDict()

    def clear(self) -> None:
        """Forget all plans."""
        self._known.clear()

    def plan(self, batch: EncoderBatch) -> Plan:
        """A plan whose replays are all captured; captures what it needs where that is allowed."""
        known = self._known.get(batch)
        if known is None:
            return self._remember(batch, self._make(batch), uses=1)
        known.uses += 1
        if known.uses == self._config.exact_after:
            return self._remember(batch, self._tightened(batch, known.plan), known.uses)
        return known.plan

    def _remember(self, batch: EncoderBatch, plan: Plan, uses: int) -> Plan:
        self._known[batch] = _Known(plan, uses)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return plan

    def _make(self, batch: EncoderBatch) -> Plan:
        entries, limit = self._store.entries, self._config.max_graphs
        while True:
            plan = self._planner.plan(batch, self._graphs())
            missing = {r.key for r in plan.replays if r.key not in entries}
            if not missing:
                return plan
            for key in sorted(missing, key=lambda k: -k.token_budget):
                if len(entries) < limit:
                    self._capture(key)

    def _graphs(self) -> Graphs:
        room = len(self._store.entries) < self._config.max_graphs
        missing = Reason.GRAPH_LIMIT if self.lazy and not room else Reason.NOT_CAPTURED
        return Graphs(self._store.entries.keys(), self._store.failed, self.lazy and room, missing)

    def _capture(self, key: GraphKey) -> None:
        """Capture `key`; plans made before don't know of it, or that it failed."""
        self._known.clear()
        self._store.capture(key)
        self._captured()

    def _tightened(self, batch: EncoderBatch, plan: Plan) -> Plan:
        """One replay of exactly the tokens of `batch` where that is faster than `plan`."""
        tokens = sum(item.num_tokens for item in batch.items)
        spent = sum(replay.key.token_budget for replay in plan.replays)
        padded = not plan.eager and spent - tokens > _TOLERATED_PADDING * spent
        # Half of the graphs are left to the budgets, which serve everything else.
        room = 2 * len(self._store.entries) < self._config.max_graphs
        if not (self.lazy and padded and room and tokens <= self._planner.budgets[-1]):
            return plan
        items = tuple(range(len(batch.items)))
        key = self._planner.key_for(batch, Bin(items, tokens))
        if key in self._store.failed:
            return plan
        if key not in self._store.entries:
            self._capture(key)
        if key not in self._store.entries or not self._is_faster(key, plan):
            return plan
        return Plan((Replay(items, key),), ())

    def _is_faster(self, key: GraphKey, plan: Plan) -> bool:
        store = self._store
        if not store.backend.is_timed:
            return True
        if store.seconds(key) < sum(store.seconds(replay.key) for replay in plan.replays):
            return True
        self._store.drop(key, Reason.NOT_FASTER)
        return False
