"""One capture: recorded, folded where it has to be, checked against eager mode, tried both ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from mmgraph.errors import CaptureError, ConfigError
from mmgraph.graphs import (
    BufferArena,
    CapturedGraph,
    GraphBackend,
    HostAccess,
    StaticBuffers,
    capture_folded,
)
from mmgraph.graphs.backend import Runnable
from mmgraph.manager.caches import private_caches
from mmgraph.manager.judge import Judge
from mmgraph.manager.outputs import Collector, OutputLayout, eager_tensors, record_layout
from mmgraph.manager.probes import Probes
from mmgraph.manager.trial import tried
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey

__all__ = ["Capturer", "Entry"]

Arena = Callable[[GraphKey], BufferArena]
"""Gives the static buffers that a key is captured on."""


class Entry:
    """A captured graph with all that belongs to it.

    Attributes:
        seconds: What the capture took.
        compile_seconds: What compiled blocks added to that.
        replay_seconds: What a replay takes, where that is measured.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        buffers: StaticBuffers,
        layout: OutputLayout,
        seconds: float,
        kept: object = None,
    ) -> None:
        self.graph = graph
        self.buffers = buffers
        self.layout = layout
        self.seconds = seconds
        self.compile_seconds = 0.0
        self._kept = kept  # what the graph reads and nobody else may hold
        self.replay_seconds: float | None = None


class Capturer:
    """Captures graphs of one encoder.

    Args:
        model: The encoder.
        facts: What it is.
        backend: Records.
        probes: What fresh graphs have to answer.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        facts: EncoderFacts,
        backend: GraphBackend,
        probes: Probes,
    ) -> None:
        self._model = model
        self._facts = facts
        self._backend = backend
        self._probes = probes
        self._judge = Judge(model, facts.name)
        self._state = object()

    def model_changed(self) -> None:
        """Take it that the next capture is like none before."""
        self._state = object()

    def capture(self, key: GraphKey, arena: Arena) -> Entry:
        """Capture `key`; the first time also without what is on trial, and keep the faster one."""
        return tried(self._model, self._backend, lambda: self._checked(key, arena))

    def _checked(self, key: GraphKey, arena: Arena) -> Entry:
        start = time.perf_counter()
        with self._backend.ordered():  # the examples go where other graphs may still be reading
            buffers = arena(key).views(self._model.capture_inputs(key))
        recorded: list[OutputLayout] = []

        def run(views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            layout, tensors = record_layout(
                self._model.encoder_forward(views, key), key.token_budget, self._facts
            )
            recorded.append(layout)
            return tensors

        with private_caches(self._model) as kept:
            graph = self._recorded(run, buffers.views, (self._state, key.signature, key.uniform))
        graph.num_bytes += kept.num_bytes
        entry = Entry(graph, buffers, recorded[-1], time.perf_counter() - start, kept)
        self._check(entry, key)
        return entry

    def _recorded(
        self, run: Runnable, views: Mapping[str, torch.Tensor], like: Hashable
    ) -> CapturedGraph:
        """A graph of `run`; with tables that are made on the host folded, where there are some."""
        try:
            with torch.inference_mode():
                return self._backend.capture(run, views, like)
        except HostAccess as error:
            try:
                return capture_folded(self._backend, run, views)
            except ConfigError:  # the backend captures whole graphs only
                raise error from None

    @torch.no_grad()
    def _check(self, entry: Entry, key: GraphKey) -> None:
        """Raise unless a fresh graph answers the encoder's probes as eager mode does."""

        def flat(output: Any) -> list[torch.Tensor]:
            return eager_tensors(output, self._facts, entry.layout)

        try:
            for probe in self._probes.of(key):
                call = probe.call
                eager = probe.tensors(flat, entry.layout)
                batch = self._model.item_specs(call)
                items = tuple(range(len(batch.items)))
                collector = Collector(entry.layout, batch)
                with self._backend.ordered():
                    entry.buffers.load(self._model.replay_inputs(call, batch, items, key))
                    collector.add(items, entry.graph.replay())
                self._judge.check(call, collector.results, eager, flat)
        except BaseException as error:
            entry.graph.close()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise CaptureError(f"a probe failed: {error}") from error
