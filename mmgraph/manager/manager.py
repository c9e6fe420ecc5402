"""`EncoderCudaGraphManager`: captures an encoder for several budgets and serves calls from them.

The way of a call::

    item_specs -> plan -> for each replay: load buffers, replay -> collect in the order of the call
                       `-> for the rest: embed_multimodal, with a counted reason

The rule: what a replay returns lives in the shared pool until the next replay, so it is copied
out before the lock is given up. Outputs belong to the caller.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mmgraph.config import GraphConfig
from mmgraph.env import debug_enabled
from mmgraph.errors import CaptureError, UnsupportedModelError
from mmgraph.graphs import GraphBackend, freeze_gc_for_cudagraph_capture, select_backend
from mmgraph.log import get_logger
from mmgraph.manager.budgets import budgets_of
from mmgraph.manager.outputs import Collector, OutputLayout, flatten_outputs
from mmgraph.manager.plan import Graphs, Plan, Planner, Replay
from mmgraph.manager.store import GraphStore
from mmgraph.policy import Bin
from mmgraph.protocol import SupportsEncoderCudaGraph, supports_encoder_cudagraph
from mmgraph.stats import EncoderStats, GraphRecord, StatsRecorder
from mmgraph.types import EncoderBatch, EncoderFacts, GraphKey, Reason, Refusal

__all__ = ["EncoderCudaGraphManager"]

_logger = get_logger(__name__)
_CACHED_PLANS = 256


class EncoderCudaGraphManager:
    """Serves an encoder's calls from captured graphs, and in eager mode where there is none.

    Args:
        config: What the user wants.
        device: Device of the encoder.
        dtype: Dtype of the encoder's weights; for reports.
        model: The encoder.
        backend: Backend to share with other managers of the same device; made by default.

    Raises:
        UnsupportedModelError: `model` doesn't implement ``SupportsEncoderCudaGraph``.
        ConfigError: The budgets don't fit the encoder, or the backend the device.
    """

    def __init__(
        self,
        config: GraphConfig,
        device: torch.device,
        dtype: torch.dtype,
        model: SupportsEncoderCudaGraph,
        *,
        backend: GraphBackend | None = None,
    ) -> None:
        if not supports_encoder_cudagraph(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} doesn't implement SupportsEncoderCudaGraph: implement its "
                "methods, or use mmgraph.attach() for a model of transformers or timm"
            )
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.model = model
        self.facts: EncoderFacts = model.encoder_facts()
        self.backend = backend or select_backend(config.backend, self.device)
        self.budgets = budgets_of(config, self.facts)
        self._planner = Planner(self.budgets)
        self._store = GraphStore(model, self.facts, self.backend, self.device, self.budgets[-1])
        self._plans: OrderedDict[EncoderBatch, Plan] = OrderedDict()
        self._debug = debug_enabled()
        self._stats = StatsRecorder()
        self._lock = threading.RLock()
        self._serving = config.capture == "lazy"

    def is_captured(self) -> bool:
        """Whether ``execute`` may replay: something is captured, or may be on first use."""
        return self._serving

    def supports_modality(self, modality: str) -> bool:
        """Whether the encoder takes items of `modality`."""
        return modality in self.facts.modalities

    def capture(
        self, graph_pool: Any | None = None, progress: Callable[[GraphKey], None] | None = None
    ) -> int:
        """Capture every budget up front, the largest first, with the collector frozen.

        Args:
            graph_pool: Pool handle to allocate from; by default one of the backend's own.
            progress: Called with each key before its capture.

        Returns:
            Bytes of device memory that the captures took.

        Raises:
            CaptureError: Not one of the graphs could be captured; the first failure is named.
        """
        keys = self.keys_to_capture()
        with self._lock:
            self.backend.use_pool(graph_pool)
            before = self._store.num_bytes
            with freeze_gc_for_cudagraph_capture():
                for key in keys:
                    if len(self._store.entries) >= self.config.max_graphs:
                        break
                    if progress is not None:
                        progress(key)
                    error = self._capture(key)
                    if error is not None and not self._store.entries:
                        raise error
            self._serving = True
            num_bytes = self._store.num_bytes - before
            _logger.info(
                "%s: %d graphs captured, %.1f MiB",
                self.facts.name,
                sum(key in self._store.entries for key in keys),
                num_bytes / 2**20,
            )
            return num_bytes

    def keys_to_capture(self) -> list[GraphKey]:
        """Keys that ``capture()`` records and that aren't captured yet, the largest first."""
        keys: dict[GraphKey, None] = {}
        for budget in reversed(self.budgets):
            for batch in self.facts.examples(budget, self.config.max_items):
                items = tuple(range(len(batch.items)))
                keys[self._planner.key_for(batch, Bin(items, budget))] = None
        return [key for key in keys if key not in self._store.entries]

    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Encode the items of a call.

        Args:
            mm_kwargs: Arguments of the encoder for one modality.

        Returns:
            The encoder's first output by item, in the order of the call.
        """
        output, batch, layout = self._serve(mm_kwargs)
        if layout is None and self.facts.eager_returns == "items":
            return list(output)
        first = flatten_outputs(output)[0]
        if batch is None:  # a call that couldn't be read, but that eager mode could run
            return [first]
        if layout is None:
            num_tokens = sum(item.num_tokens for item in batch.items)
            layout, _ = self._store.record(output, num_tokens)
        return layout.split(first, batch)

    def run(self, mm_kwargs: Mapping[str, Any]) -> Any:
        """Like :meth:`execute`, but return what the encoder itself would return for the call."""
        return self._serve(mm_kwargs)[0]

    def clear(self) -> None:
        """Free every graph and buffer; lazily captured ones come back on use."""
        with self._lock:
            self._stats.forget(list(self._store.entries))
            self._store.clear()
            self._plans.clear()
            self._serving = self.config.capture == "lazy"

    def stats(self) -> EncoderStats:
        """Counters and graphs as they are now."""
        with self._lock:
            records = tuple(
                GraphRecord(key, self._stats.replays(key), entry.graph.num_bytes, entry.seconds)
                for key, entry in self._store.entries.items()
            )
            return self._stats.snapshot(records)

    def memory_by_graph(self) -> dict[GraphKey, int]:
        """Device memory of each graph in bytes."""
        return {record.key: record.num_bytes for record in self.stats().graphs}

    def count_miss(self, reason: Reason, num_items: int = 1) -> None:
        """Count a call that somebody else ran in eager mode."""
        self._stats.called()
        self._stats.missed(reason, num_items)

    def _serve(
        self, mm_kwargs: Mapping[str, Any]
    ) -> tuple[Any, EncoderBatch | None, OutputLayout | None]:
        self._stats.called()
        try:
            batch = self.model.item_specs(mm_kwargs)
            if self.backend.busy():
                raise Refusal(Reason.COMPILING, batch)
        except Refusal as refusal:
            return self._run_eagerly(mm_kwargs, refusal), refusal.batch, None
        with self._lock:
            plan = self._plan(batch)
            if plan.replays:
                layout, tensors = self._run_plan(mm_kwargs, batch, plan)
                return layout.build(tensors), batch, layout
        for part in plan.eager:
            self._stats.missed(part.reason, len(part.items))
        return self.model.embed_multimodal(**mm_kwargs), batch, None

    def _run_eagerly(self, mm_kwargs: Mapping[str, Any], refusal: Refusal) -> Any:
        self._stats.missed(refusal.reason, refusal.num_items)
        return self.model.embed_multimodal(**mm_kwargs)

    def _plan(self, batch: EncoderBatch) -> Plan:
        """A plan whose replays are all captured; captures what it needs where that is allowed."""
        known = self._plans.get(batch)
        if known is not None:
            return known
        while True:
            plan = self._planner.plan(batch, self._graphs())
            missing = {r.key for r in plan.replays if r.key not in self._store.entries}
            if not missing:
                break
            for key in sorted(missing, key=lambda k: -k.token_budget):
                if len(self._store.entries) < self.config.max_graphs:
                    self._capture(key)
        self._plans[batch] = plan
        if len(self._plans) > _CACHED_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _graphs(self) -> Graphs:
        lazy = self.config.capture == "lazy"
        room = len(self._store.entries) < self.config.max_graphs
        missing = Reason.GRAPH_LIMIT if lazy and not room else Reason.NOT_CAPTURED
        return Graphs(self._store.entries.keys(), self._store.failed, lazy and room, missing)

    @torch.no_grad()
    def _run_plan(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, plan: Plan
    ) -> tuple[OutputLayout, list[torch.Tensor]]:
        layout = self._store.entries[plan.replays[0].key].layout
        collector = Collector(layout, batch)
        for part in plan.eager:
            self._stats.missed(part.reason, len(part.items))
            output = self.model.embed_multimodal(**self.model.select_items(mm_kwargs, part.items))
            collector.add(part.items, self._store.eager_tensors(output))
        with self.backend.ordered():
            for replay in plan.replays:
                collector.add(replay.items, self._replay(mm_kwargs, batch, replay))
        return layout, collector.results

    def _replay(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, replay: Replay
    ) -> list[torch.Tensor]:
        entry = self._store.entries[replay.key]
        if self._debug:
            entry.buffers.check_addresses()
        entry.buffers.load(self.model.replay_inputs(mm_kwargs, batch, replay.items, replay.key))
        tensors = entry.graph.replay()
        num_tokens = sum(batch.items[i].num_tokens for i in replay.items)
        self._stats.replayed(replay.key, len(replay.items), num_tokens)
        return tensors

    def _capture(self, key: GraphKey) -> CaptureError | None:
        """Capture `key`; plans made before don't know of it, or that it failed."""
        self._plans.clear()
        return self._store.capture(key)
