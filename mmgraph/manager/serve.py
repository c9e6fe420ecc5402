"""The way of a call through the graphs of an encoder, or past them.

::

    item_specs -> plan -> for each replay: load buffers, replay -> collect in the order of the call
                       `-> for the rest: embed_multimodal, with a counted reason

The rule: what a replay returns lives in the shared pool until the next replay, so it is copied
out before the lock is given up. Outputs belong to the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from mmgraph.config import GraphConfig
from mmgraph.env import debug_enabled
from mmgraph.graphs import GraphBackend
from mmgraph.manager.audit import Audit
from mmgraph.manager.changes import Changes
from mmgraph.manager.contents import copied
from mmgraph.manager.exact import ExactGraphs
from mmgraph.manager.misses import Misses
from mmgraph.manager.outputs import Collector, OutputLayout, eager_tensors, flatten_outputs
from mmgraph.manager.planned import Plan, Replay
from mmgraph.manager.plans import Plans
from mmgraph.manager.ranges import Ranges
from mmgraph.manager.store import GraphStore
from mmgraph.protocol import SupportsDivision, SupportsEncoderCudaGraph
from mmgraph.stats import StatsRecorder
from mmgraph.types import EncoderBatch, EncoderFacts, GraphKey, Reason, Refusal

__all__ = ["Server"]

_BEYOND_BUDGETS = frozenset(
    {Reason.UNSUPPORTED_CALL, Reason.ABOVE_BUDGET, Reason.CAPTURE_FAILED, Reason.PIECEWISE}
)
"""Reasons for eager mode that a graph of the exact call can do without."""
_Served = tuple[Any, EncoderBatch | None, OutputLayout | None]


class Server:
    """Serves calls of one encoder.

    Args:
        model: The encoder.
        facts: What it is.
        config: What the user wants.
        store: Its graphs of budgets.
        plans: How calls are divided over them.
        exact: Its graphs of exact calls, if it has some.
        changes: Whether graphs are out of date.
        audit: Whether they were seen to differ.
        stats: Counts.
        lock: The manager's.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        facts: EncoderFacts,
        config: GraphConfig,
        *,
        store: GraphStore,
        plans: Plans,
        exact: ExactGraphs | None,
        changes: Changes,
        audit: Audit,
        stats: StatsRecorder,
        lock: threading.RLock,
    ) -> None:
        self._model = model
        self._facts = facts
        self._config = config
        self._backend: GraphBackend = store.backend
        self._store = store
        self._plans = plans
        self._exact = exact
        self._changes = changes
        self._audit = audit
        self._stats = stats
        self._lock = lock
        self._closed = config.closed
        self._own = model.parameters if isinstance(model, nn.Module) else None
        self._debug = debug_enabled()
        self._misses = Misses(stats, config, facts.name, has_exact=exact is not None)
        self._range = Ranges(facts.name)

    def serve(self, mm_kwargs: Mapping[str, Any]) -> _Served:
        """The output for a call, with its items and where they lie in it, as far as it was read."""
        self._stats.called()
        if not self._changes.holds or self._closed or self._debug or self._backend.busy():
            return self._serve_any(mm_kwargs)
        read = self._read(mm_kwargs)
        served = self._serve_known(mm_kwargs, read)
        return self._serve_any(mm_kwargs, read) if served is None else served

    def _read(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch | Refusal:
        """The items of a call, or why no budget can serve it."""
        try:
            batch = self._model.item_specs(mm_kwargs)
        except Refusal as refusal:
            return refusal.with_traceback(None)  # its frames hold the call
        return batch if batch.items else Refusal(Reason.NO_ITEMS, batch)

    def _serve_known(
        self, mm_kwargs: Mapping[str, Any], read: EncoderBatch | Refusal
    ) -> _Served | None:
        """Serve a call whose graphs are there; whether they are still right shows while they run.

        ``None``: it has to go the long way.
        """
        if isinstance(read, Refusal):
            return self._serve_known_exactly(mm_kwargs, read)
        if self._wants_gradients(mm_kwargs):
            return None
        if self._config.mode == "piecewise":
            return self._serve_known_exactly(mm_kwargs, Refusal(Reason.PIECEWISE, read))
        with self._lock:
            plan = self._plans.ready(read) if self._may_replay_first() else None
            if plan is None:
                return None
            layout = self._store.entries[plan.replays[0].key].layout
            collector = Collector(layout, read)
            try:
                self._replay_all(mm_kwargs, read, plan, collector)
            except Exception:
                if self._changes.differs():  # it ran what is no more: the long way decides
                    return None
                raise
            if self._changes.differs():
                return None
            self._plans.used(read)
            self._seen(read)
            self._count(read, plan)
            output = layout.build(collector.results)
            return self._audited(mm_kwargs, output, layout), read, layout

    def _serve_known_exactly(
        self, mm_kwargs: Mapping[str, Any], refusal: Refusal
    ) -> _Served | None:
        """Serve a call that no budget takes in the same way, from a graph of its own."""
        if self._exact is None or refusal.reason not in _BEYOND_BUDGETS:
            return None
        with self._lock:
            known = self._exact.known(mm_kwargs) if self._may_replay_first() else None
            if known is None or self._changes.differs():
                return None
            output, key = known
            if refusal.reason is Reason.PIECEWISE and refusal.batch is not None:
                self._seen(refusal.batch)
            self._count_exact(key, refusal.num_items)
        return self._audited(mm_kwargs, output), refusal.batch, None

    def _may_replay_first(self) -> bool:
        """Asked under the lock: another thread may have freed what was there a moment ago."""
        return self._changes.may_come_late() and not self._audit.failed()

    def _serve_any(
        self, mm_kwargs: Mapping[str, Any], read: EncoderBatch | Refusal | None = None
    ) -> _Served:
        """Serve a call in whatever way there is, with `read` as what it holds, if that is known."""
        distrust = self._closed or self._distrust()
        if read is None or not self._changes.may_come_late():  # read of the encoder as it was
            read = self._read(mm_kwargs)
        if not isinstance(read, Refusal):
            self._seen(read)
            if self._wants_gradients(mm_kwargs):
                read = Refusal(Reason.GRAD, read)
            elif self._backend.busy():
                read = Refusal(Reason.COMPILING, read)
            elif distrust is not None or self._config.mode == "piecewise":
                read = Refusal(distrust or Reason.PIECEWISE, read)
        if isinstance(read, Refusal):
            reason, num_items, why = read.reason, read.num_items, str(read)
            if distrust is not None and reason in _BEYOND_BUDGETS:
                reason = distrust
            return self._beyond_budgets(mm_kwargs, reason, num_items, why), read.batch, None
        with self._lock:
            parts, plan = self._planned(read)
            if plan.replays:
                layout, tensors = self._run_plan(mm_kwargs, parts, plan)
                return self._audited(mm_kwargs, layout.build(tensors), layout), read, layout
        if len(plan.eager) == 1:
            part = plan.eager[0]
            return self._beyond_budgets(mm_kwargs, part.reason, len(part.items)), read, None
        for part in plan.eager:
            self._misses.add(part.reason, len(part.items))
        return self._model.embed_multimodal(**mm_kwargs), read, None

    def _planned(self, batch: EncoderBatch) -> tuple[EncoderBatch, Plan]:
        """A plan, and what it is for: where graphs serve an item in parts, its parts."""
        plan, model = self._plans.plan(batch), self._model
        too_large = any(part.reason is Reason.ABOVE_BUDGET for part in plan.eager)
        if too_large and isinstance(model, SupportsDivision):
            parts = model.divided(batch, self._plans.largest_budget)
            divided = None if parts is None else self._plans.plan(parts)
            if parts is not None and divided is not None and not divided.eager:
                return parts, divided
            if any(replay.key not in self._store.entries for replay in plan.replays):
                plan = self._plans.plan(batch)  # the parts have taken the place of its graphs
        return batch, plan

    def _beyond_budgets(
        self, mm_kwargs: Mapping[str, Any], reason: Reason, num_items: int, why: str = ""
    ) -> Any:
        """Serve a call from a graph of its own, or in eager mode."""
        if self._exact is not None and reason in _BEYOND_BUDGETS and not self._backend.busy():
            try:
                with self._lock:
                    output, key = self._exact.serve(mm_kwargs, reason, self._room())
                    self._count_exact(key, num_items)
            except Refusal as refusal:
                if refusal.reason is not reason:
                    reason, why = refusal.reason, str(refusal)
            else:
                return self._audited(mm_kwargs, output)
        self._misses.add(reason, num_items, why)
        with self._range("eager", reason.name):
            return self._model.embed_multimodal(**mm_kwargs)

    def _count_exact(self, key: GraphKey, num_items: int) -> None:
        self._changes.replayed(fresh=self._stats.replays(key) == 0)
        self._stats.replayed(key, num_items, key.token_budget)
        if self._exact is not None and self._store.is_over:
            self._exact.refuse(key)

    def refuse_mode(self, mm_kwargs: Mapping[str, Any]) -> None:
        """Raise ``Refusal`` where not even a graph of its own could serve the call now."""
        try:
            self._model.item_specs(mm_kwargs)
        except Refusal as refusal:
            if refusal.reason not in _BEYOND_BUDGETS:
                raise
        if self._backend.busy():
            raise Refusal(Reason.COMPILING)

    def _wants_gradients(self, mm_kwargs: Mapping[str, Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        values = chain(mm_kwargs.values(), () if self._own is None else self._own())
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    def _distrust(self) -> Reason | None:
        """Why no graph may serve now; frees those that are no longer right."""
        if self._backend.busy():
            return None
        with self._lock:
            if self._audit.failed():
                return Reason.DIFFERED
            return Reason.CHANGED if self._changes.noticed() else None

    def _room(self) -> int:
        """How many graphs of exact calls there may be."""
        return self._config.max_graphs - len(self._store.entries) if self._plans.lazy else 0

    def _audited(
        self, mm_kwargs: Mapping[str, Any], output: Any, layout: OutputLayout | None = None
    ) -> Any:
        """Return `output`, which graphs gave; one in some is compared with eager mode."""
        if self._audit.is_due():
            try:
                eager = self._model.embed_multimodal(**copied(mm_kwargs))
                self._audit.compare(
                    flatten_outputs(output),
                    flatten_outputs(eager)
                    if layout is None
                    else eager_tensors(eager, self._facts, layout),
                )
            except torch.OutOfMemoryError as error:  # the answer is there, only the check isn't
                self._audit.skipped(error)
        return output

    @torch.no_grad()
    def _run_plan(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, plan: Plan
    ) -> tuple[OutputLayout, list[torch.Tensor]]:
        layout = self._store.entries[plan.replays[0].key].layout
        collector = Collector(layout, batch)
        for part in plan.eager:
            call = self._model.select_items(mm_kwargs, part.items)
            output = self._beyond_budgets(call, part.reason, len(part.items))
            collector.add(part.items, eager_tensors(output, self._facts, layout))
        self._replay_all(mm_kwargs, batch, plan, collector)
        self._count(batch, plan)
        return layout, collector.results

    def _replay_all(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, plan: Plan, collector: Collector
    ) -> None:
        with self._backend.ordered():
            for replay in plan.replays:
                tensors = self._replay(mm_kwargs, batch, replay)
                collector.add(replay.items, tensors)
                if self._debug:
                    collector.check_owned(tensors)

    def _seen(self, batch: EncoderBatch) -> None:
        self._stats.seen(tuple([item.num_tokens for item in batch.items]))

    def _count(self, batch: EncoderBatch, plan: Plan) -> None:
        """Count replays whose outputs are handed out."""
        self._changes.replayed()
        for replay in plan.replays:
            items = [batch.items[i] for i in replay.items]
            num_items = sum(not item.is_rest for item in items)
            num_tokens = sum(item.num_tokens for item in items)
            self._stats.replayed(replay.key, num_items, num_tokens)

    def _replay(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, replay: Replay
    ) -> list[torch.Tensor]:
        entry = self._store.entries[replay.key]
        if self._debug:
            entry.buffers.check_addresses()
        with self._range("replay", replay.key):
            pieces = self._model.replay_inputs(mm_kwargs, batch, replay.items, replay.key)
            entry.buffers.load(pieces)
            return entry.graph.replay()
