"""The plans of calls that came before, and the captures that new ones ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, reduce
from math import inf

from mmgraph.config import GraphConfig
from mmgraph.log import get_logger
from mmgraph.manager.demand import Demand
from mmgraph.manager.known import Known, KnownPlans
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Graphs, Plan
from mmgraph.manager.prices import Measured, Savings, saving
from mmgraph.manager.store import GraphStore
from mmgraph.manager.tight import TightGraphs
from mmgraph.types import EncoderBatch, GraphKey, Reason

__all__ = ["Plans"]

_logger = get_logger(__name__)
_ROUNDS = 2


class Plans:
    """Plans by batch; used under the manager's lock.

    Args:
        config: What the user wants.
        planner: Divides batches over budgets.
        store: Holds the graphs.
        general: Keys that take whatever a budget can hold; see ``UpFront.keys_of``.
        captured: Called after each capture.
        evicted: Called with the number of graphs that go for one that is asked for more.
    """

    def __init__(
        self,
        config: GraphConfig,
        planner: Planner,
        store: GraphStore,
        general: Callable[[int], Iterable[GraphKey]],
        captured: Callable[[], None],
        evicted: Callable[[int], None],
    ) -> None:
        self.lazy = config.capture == "lazy"
        self._config = config
        self._planner = planner
        self._store = store
        self._keys_of = general
        self._captured = captured
        self._evicted = evicted
        self.at_once = False  # whether a graph is captured the first time that it is asked for
        self._known = KnownPlans()
        self._demand = Demand()
        self._general_keys: dict[int, GraphKey | None] = {}
        self._savings = Savings(lambda: store.measured)
        self._tight = TightGraphs(
            config,
            planner,
            store,
            self._demand,
            self._savings,
            self._capture_instead,
            lambda: self.lazy,
        )
        self._scarce: tuple[Measured, tuple[int, ...], bool] | None = None
        """Whether there is hardly room for more graphs, by the graphs and budgets there were."""

    @property
    def largest_budget(self) -> int:
        """Of the budgets that calls are divided over, in tokens."""
        return self._planner.budgets[-1]

    def clear(self) -> None:
        """Forget all plans."""
        self._known.clear()
        self._general_keys.clear()
        self._scarce = None

    def ready(self, batch: EncoderBatch) -> Plan | None:
        """The plan of a batch, if it is all replays of graphs that are there, and none is due.

        Nothing is counted: :meth:`used` does that, and where there is none :meth:`plan`.
        """
        known = self._known.get(batch)
        if known is None:
            uses = self._known.uses(batch)
            if self._tight.recurring(batch, counted=False) or self._tight.is_due(uses + 1):
                return None
            plan = self._planner.plan(batch, self._graphs(may_capture=True))
            captured = all(replay.key in self._store.entries for replay in plan.replays)
            if not captured or plan.eager or not plan.replays:
                return None
            self._known[batch] = Known(plan, uses)
            return plan
        if known.waiting or known.plan.eager or not known.plan.replays:
            return None
        return None if self._tight.is_due(known.uses + 1, known) else known.plan

    def used(self, batch: EncoderBatch) -> None:
        """Count that a plan that was ready has served."""
        known = self._known[batch]
        known.uses += 1
        self._demand.call()
        if known.uses == 1:
            self._tight.wish(batch)
        self._add_demand(known)

    def plan(self, batch: EncoderBatch) -> Plan:
        """A plan whose replays are all captured; captures what it needs where that is allowed."""
        self._demand.call()
        known = self._known.get(batch)
        if known is None:
            uses = self._known.uses(batch) + 1
            if uses == 1:
                self._tight.wish(batch)
            self._tight.capture_items(batch)
            known = self._make(batch, uses, is_new=True)
        else:
            known.uses += 1
            if known.waiting and self._are_due(known.waiting):
                known = self._make(batch, known.uses, is_new=False)
        if self._tight.is_due(known.uses, known):
            known = self._known[batch] = self._tight.tried(batch, known)
            if any(replay.key not in self._store.entries for replay in known.plan.replays):
                # The attempt left no room for what was there.
                known = self._make(batch, known.uses, is_new=False)
                known.again = inf
        self._add_demand(known)
        return known.plan

    def _add_demand(self, known: Known) -> None:
        """Count a use of each graph of a plan, and of one that there is no room for yet."""
        for replay in known.plan.replays:
            self._demand.add(replay.key)
        if known.wish is not None:
            self._demand.add(known.wish)

    def _are_due(self, waiting: Sequence[GraphKey]) -> bool:
        """Count another wish for keys that were too rare or too many; whether one is due."""
        for key in waiting:
            self._demand.add(key)
        return self.lazy and any(self._is_due(key) for key in waiting)

    def _make(self, batch: EncoderBatch, uses: int, *, is_new: bool) -> Known:
        entries = self._store.entries
        rounds, asked = _ROUNDS, dict[GraphKey, None]()
        while True:
            plan = self._planner.plan(batch, self._graphs(may_capture=rounds > 0))
            missing = {r.key for r in plan.replays if r.key not in entries}
            if not missing:
                break
            for key in missing - asked.keys() if is_new else ():
                self._demand.add(key)
            asked.update(dict.fromkeys(missing))
            in_use = {r.key for r in plan.replays}
            ready = [key for key in missing if self._is_due(key, in_use)]
            if not ready:
                plan = self._planner.plan(batch, self._graphs(may_capture=False, waiting=missing))
                break
            for key in sorted(ready, key=lambda k: -k.token_budget):
                self._capture(key, in_use)
            # What was just measured may speak for another plan; once is enough.
            rounds -= self._store.backend.is_timed and not self._store.failed.keys() & missing
        known = self._known[batch] = Known(plan, uses, tuple(missing))
        return known

    def _graphs(self, *, may_capture: bool, waiting: Collection[GraphKey] = ()) -> Graphs:
        store, missing = self._store, Reason.NOT_CAPTURED
        if self.lazy and len(store.entries) >= self._config.max_graphs:
            missing = Reason.GRAPH_LIMIT
        elif self.lazy and any(not store.has_room(key) for key in waiting):
            missing = Reason.MEMORY_LIMIT
        elif not self.lazy and not store.entries:  # captured up front, or tried
            missing = Reason.MEMORY_LIMIT if store.too_large else missing
            missing = next(iter(store.failed.values()), missing)
        may_capture = may_capture and self.lazy
        general = self._general if self._is_scarce() else None
        return Graphs(
            store.entries.keys(), store.failed, may_capture, missing, general, store.measured
        )

    def _is_scarce(self) -> bool:
        """Whether what may be captured yet is for the budgets that have no graph for everything.

        A graph for one image of a budget leaves two images to eager mode once there is no room.
        """
        budgets, measured = self._planner.budgets, self._store.measured
        room = self._config.max_graphs - len(self._store.entries)
        if not self.lazy or room > len(budgets):
            return False
        known = self._scarce
        if known is None or known[0] is not measured or known[1] != budgets:
            without = [budget for budget in budgets if not self._takes_all(budget)]
            known = self._scarce = measured, budgets, room <= len(without)
        return known[2]

    def _takes_all(self, budget: int) -> bool:
        """Whether a graph of `budget` takes whatever it can hold."""
        general = self._general(budget)
        graphs = [key for key in self._store.entries if key.token_budget == budget]
        return general is not None and any(g.covers(general.of(g.signature)) for g in graphs)

    def _general(self, budget: int) -> GraphKey | None:
        """A key for whatever a budget can hold, of some signature; ``None`` if none is known."""
        if budget not in self._general_keys:
            try:
                keys = list(self._keys_of(budget))
                self._general_keys[budget] = reduce(GraphKey.joined, keys) if keys else None
            except Exception as error:  # an encoder without examples serves all the same
                _logger.debug("no example of %d tokens: %r", budget, error)
                self._general_keys[budget] = None
        return self._general_keys[budget]

    def _is_due(self, key: GraphKey, in_use: Collection[GraphKey] = ()) -> bool:
        """Whether `key` is to be captured, in the place of other graphs where that is needed."""
        if not (self.at_once or self._demand.wanted(key, self._config.min_hits)):
            return False
        return self._victims(key, in_use) is not None

    def _victims(self, key: GraphKey, in_use: Collection[GraphKey]) -> list[GraphKey] | None:
        """Graphs that have to go so that there is room for `key`; ``None`` if they are to stay."""
        store, measured, gone = self._store, self._store.measured, list[GraphKey]()
        while len(store.entries) - len(gone) >= self._config.max_graphs or not store.has_room(
            key, gone
        ):
            others = [graph for graph in store.entries if graph not in {*in_use, *gone}]
            worth = partial(saving, measured=measured, gone=frozenset(gone))
            victim = self._demand.victim(key, others, worth if gone else self._savings)
            if victim is None:
                return None
            gone.append(victim)
        return gone

    def _capture(self, key: GraphKey, in_use: Collection[GraphKey] = ()) -> None:
        """Capture `key`, unless another one of the call has taken the room."""
        victims = self._victims(key, in_use)
        if victims is not None:
            self._capture_instead(key, victims)

    def _capture_instead(self, key: GraphKey, victims: Sequence[GraphKey]) -> None:
        """Capture `key`; plans made before don't know of it, or that it failed."""
        self._known.forget()
        before = set(self._store.entries)
        if victims:
            self._store.free(victims)
            self._demand.evicted(victims)
        self._store.capture(key)
        gone = before - self._store.entries.keys()  # all of them if the attempt left no room
        if gone:
            self._evicted(len(gone))
        self._captured()
