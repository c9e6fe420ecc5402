"""`EncoderCudaGraphManager`: captures an encoder for several budgets and serves calls from them.

It puts the parts together and captures, measures and frees; the way of a call is in ``serve.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmgraph.config import GraphConfig
from mmgraph.errors import CaptureError, UnsupportedModelError
from mmgraph.graphs import GraphBackend, select_backend
from mmgraph.manager.audit import Audit
from mmgraph.manager.budgets import budgets_of, checked_budgets
from mmgraph.manager.capture import Entry
from mmgraph.manager.changes import Changes
from mmgraph.manager.exact import exact_graphs
from mmgraph.manager.outputs import flatten_outputs, record_layout
from mmgraph.manager.plan import Planner
from mmgraph.manager.plans import Plans
from mmgraph.manager.prices import PER_REPLAY, in_eager
from mmgraph.manager.serve import Server
from mmgraph.manager.store import GraphStore
from mmgraph.manager.upfront import UpFront, estimate
from mmgraph.protocol import SupportsEncoderCudaGraph, supports_encoder_cudagraph
from mmgraph.stats import EncoderStats, GraphRecord, StatsRecorder
from mmgraph.types import EncoderFacts, GraphKey, Reason, Refusal

__all__ = ["EncoderCudaGraphManager"]


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
        self._planner = Planner(self.budgets, uniform=self.facts.uniform_graphs)
        self._store = GraphStore(
            model,
            self.facts,
            self.backend,
            self.device,
            self.budgets[-1],
            config.max_graph_bytes,
        )
        self._stats = StatsRecorder()
        self._store.limit.freed = lambda keys: self._stats.forget(list(keys))
        self._store.limit.others = lambda: 0 if self._exact is None else self._exact.num_bytes
        self._store.limit.reclaim = self._reclaim
        self._exact = exact_graphs(config, model, self.facts.name, self.backend, self._stats)
        self._lock = threading.RLock()
        self.upfront = UpFront(config, self.facts, self._planner, self._store, self._lock)
        self._plans = Plans(
            config,
            self._planner,
            self._store,
            self.upfront.keys_of,
            self._captured,
            self._stats.evicted,
        )
        self._audit = Audit(config.verify_every, self.facts.name)
        self._lazy, self._blocks, self._shut = self._plans.lazy, 0, False
        self._serving = self._plans.lazy and config.closed is None
        recapture = self._plans.lazy and config.on_change == "recapture"
        self._changes = Changes(model, self.facts.name, recapture=recapture, free=self._free)
        self._server = Server(
            model,
            self.facts,
            config,
            store=self._store,
            plans=self._plans,
            exact=self._exact,
            changes=self._changes,
            audit=self._audit,
            stats=self._stats,
            lock=self._lock,
        )

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
            Bytes of device memory that the captures and their static buffers took.

        Raises:
            CaptureError: Not one of the graphs could be captured; the first failure is named.
                Where memory ran out, all budgets are tried before.
        """
        if self.config.closed is not None:
            return 0
        with self._lock:
            self._changes.renew()
            self.backend.use_pool(graph_pool)
            self._plans.clear()
            num_bytes = self.upfront.capture(progress)
            self._captured()
            self._serving = True
            return num_bytes

    def estimate(self) -> int:
        """Bytes of device memory that ``capture()`` would take, within about 15 %.

        Some graphs are captured into a pool of their own, and freed again. Where graphs are
        captured already it is an upper bound, since further ones partly live in their memory.

        Raises:
            CaptureError: Not one of the graphs can be captured.
        """
        return 0 if self.config.closed is not None else estimate([self.upfront])

    def keys_to_capture(self) -> list[GraphKey]:
        """Keys that ``capture()`` records and that aren't captured yet, the largest first."""
        return self.upfront.keys()

    def capture_call(self, mm_kwargs: Mapping[str, Any]) -> None:
        """Capture a graph of its own for calls of exactly these sizes.

        With ``capture="upfront"`` this is the only way to one; otherwise such a graph comes by
        itself when budgets don't serve a call and it comes a second time.

        Args:
            mm_kwargs: Arguments of the encoder, with any contents.

        Raises:
            UnsupportedModelError: The encoder has no such graphs, or ``mode`` is "full".
            CaptureError: It can't be captured, differs from eager mode, is no faster, or
                ``max_graphs`` is reached.
        """
        if self._exact is None:
            why = ": mode is 'full'" if self.config.mode == "full" else ""
            raise UnsupportedModelError(f"{self.facts.name} has no graphs of exact calls{why}")
        if self.config.closed is not None:
            raise CaptureError(f"nothing may run from graphs: {self.config.closed.value}")
        try:
            with self._lock, torch.no_grad():
                self._changes.renew()
                self._server.refuse_mode(mm_kwargs)
                self._exact.capture(mm_kwargs, self.config.max_graphs - len(self._store.entries))
                self._serving = True
        except Refusal as refusal:
            raise CaptureError(f"the call can't have a graph of its own: {refusal}") from refusal

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within the block every call captures the graphs that it needs, at once.

        So an encoder with ``capture="upfront"`` learns from examples what to be ready for, sizes
        that need graphs of exact calls included.
        """
        self._set_capturing(+1)
        try:
            yield
        finally:
            self._set_capturing(-1)

    def _set_capturing(self, blocks: int) -> None:
        """Count blocks of several threads: the last one that ends restores what was before."""
        with self._lock:
            self._blocks += blocks
            is_open = self.config.closed is None and not self._shut
            at_once = self._blocks > 0 and not self._shut
            self._plans.lazy, self._plans.at_once = self._lazy or at_once, at_once
            self._plans.clear()
            self._serving = is_open and (self._plans.lazy or bool(self.stats().graphs))
            if self._exact is not None:
                self._exact.at_once = at_once

    def use_budgets(self, budgets: Sequence[int]) -> None:
        """Serve from these ascending budgets, in tokens, from now on.

        Graphs of other budgets are freed, and where the largest budget grows all of them, since
        their buffers have to. With ``capture="upfront"``, ``capture()`` records the missing ones.

        Raises:
            ConfigError: The budgets don't fit the encoder; nothing has changed then.
        """
        budgets = checked_budgets(tuple(budgets), self.facts)
        with self._lock:
            self._stats.forget(self._store.use_budgets(budgets))
            self.budgets = self._planner.budgets = budgets
            self._plans.clear()

    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Encode the items of a call.

        Args:
            mm_kwargs: Arguments of the encoder for one modality.

        Returns:
            The encoder's first output by item, in the order of the call.
        """
        output, batch, layout = self._server.serve(mm_kwargs)
        if layout is None and self.facts.eager_returns == "items":
            return list(output)
        first = flatten_outputs(output)[0]
        if batch is None:  # a call that couldn't be read, but that eager mode could run
            return [first]
        if layout is None:
            num_tokens = sum(item.num_tokens for item in batch.items)
            layout, _ = record_layout(output, num_tokens, self.facts)
        return layout.split(first, batch)

    def run(self, mm_kwargs: Mapping[str, Any]) -> Any:
        """Like :meth:`execute`, but return what the encoder itself would return for the call."""
        return self._server.serve(mm_kwargs)[0]

    def clear(self) -> None:
        """Free every graph and buffer; lazily captured ones come back on use."""
        with self._lock:
            self._free()
            self._serving = self._plans.lazy and self.config.closed is None
            self._changes.reset()
            self._audit.reset()

    def _free(self) -> None:
        with self._lock:
            self._stats.forget([record.key for record in self.stats().graphs])
            self._store.clear()
            if self._exact is not None:
                self._exact.clear()
            self._plans.clear()

    def shutdown(self) -> None:
        """Free every graph and buffer; nothing is captured on use any more."""
        with self._lock:
            self._lazy = self._plans.lazy = False
            self._shut = True
            self.clear()

    def stats(self) -> EncoderStats:
        """Counters and graphs as they are now."""
        with self._lock:
            records = [self._record(key, entry) for key, entry in self._store.entries.items()]
            for key, exact in () if self._exact is None else self._exact.entries.items():
                records.append(
                    GraphRecord(
                        key,
                        self._stats.replays(key),
                        exact.num_bytes,
                        exact.seconds,
                        exact.compile_seconds,
                        exact.replay_seconds,
                        exact.eager_seconds,
                    )
                )
            return self._stats.snapshot(tuple(records), self.budgets)

    def _record(self, key: GraphKey, entry: Entry) -> GraphRecord:
        tokens, measured = self._stats.tokens_per_replay(key), self._store.measured
        return GraphRecord(
            key,
            self._stats.replays(key),
            entry.graph.num_bytes,
            entry.seconds,
            entry.compile_seconds,
            None if entry.replay_seconds is None else entry.replay_seconds + PER_REPLAY,
            in_eager(key, tokens, measured),
        )

    def memory_by_graph(self) -> dict[GraphKey, int]:
        """Device memory of each graph in bytes."""
        return {record.key: record.num_bytes for record in self.stats().graphs}

    @property
    def counters(self) -> StatsRecorder:
        """What counts the calls; it may outlive the manager."""
        return self._stats

    def count_miss(self, reason: Reason, num_items: int = 1) -> None:
        """Count a call that somebody else ran in eager mode."""
        self._stats.called()
        self._stats.missed(reason, num_items)

    def _reclaim(self) -> None:
        """Let graphs of exact calls give way while too much memory is taken."""
        while self._exact is not None and self._exact.entries and self._store.is_over:
            self._exact.shrink(len(self._exact.entries) - 1)

    def _captured(self) -> None:
        self._changes.captured()
        self._make_room()

    def _make_room(self) -> None:
        """Let graphs of exact calls give way to those of budgets."""
        if self._exact is not None:
            self._exact.shrink(self.config.max_graphs - len(self._store.entries))
