"""The graphs of one encoder by key: capture, check, free. The manager decides which and when."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs import BufferArena, CapturedGraph, GraphBackend, StaticBuffers
from mmgraph.log import WarnOnce, get_logger
from mmgraph.manager.outputs import OutputLayout, flatten_outputs
from mmgraph.manager.verify import largest_error, max_error
from mmgraph.policy import segment_tier
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey, Reason

__all__ = ["Entry", "GraphStore"]


class Entry:
    """A captured graph with all that belongs to it."""

    def __init__(
        self, graph: CapturedGraph, buffers: StaticBuffers, layout: OutputLayout, seconds: float
    ) -> None:
        self.graph = graph
        self.buffers = buffers
        self.layout = layout
        self.seconds = seconds


class GraphStore:
    """Captures and holds the graphs of an encoder; used under the manager's lock.

    Attributes:
        entries: Graphs by key.
        failed: Keys that can't be captured, and why.
        arenas: Static buffers by call signature, each at its largest size.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        facts: EncoderFacts,
        backend: GraphBackend,
        device: torch.device,
        largest_budget: int,
    ) -> None:
        self.entries: dict[GraphKey, Entry] = {}
        self.failed: dict[GraphKey, Reason] = {}
        self.arenas: dict[Hashable, BufferArena] = {}
        self._model = model
        self._facts = facts
        self._backend = backend
        self._device = device
        self._largest_budget = largest_budget
        self._warn_once = WarnOnce(get_logger(__name__))

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs in bytes."""
        return sum(entry.graph.num_bytes for entry in self.entries.values())

    def clear(self) -> None:
        """Free every graph and buffer, and forget what failed."""
        for entry in self.entries.values():
            entry.graph.close()
        self.entries.clear()
        self.arenas.clear()
        self.failed.clear()

    def capture(self, key: GraphKey) -> CaptureError | None:
        """Capture `key`; on failure remember that, warn once and return the error."""
        self.failed.pop(key, None)
        try:
            self.entries[key] = self._capture(key)
        except CaptureError as error:
            self.failed[key] = Reason.CAPTURE_FAILED
            if not any(other.signature == key.signature for other in self.entries):
                self.arenas.pop(key.signature, None)  # buffers that no graph reads
            self._warn_once(
                key.signature, "%s runs in eager mode for %s: %s", self._facts.name, key, error
            )
            return error
        return None

    def _capture(self, key: GraphKey) -> Entry:
        start = time.perf_counter()
        with self._backend.ordered():  # the examples go where other graphs may still be reading
            buffers = self._arena(key).views(self._model.capture_inputs(key))
        recorded: list[OutputLayout] = []

        def run(views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            layout, tensors = self.record(self._model.encoder_forward(views, key), key.token_budget)
            recorded.append(layout)
            return tensors

        with torch.inference_mode():
            graph = self._backend.capture(run, buffers.views)
        entry = Entry(graph, buffers, recorded[-1], time.perf_counter() - start)
        if self._facts.probes is not None:
            self._check(entry, key, self._facts.probes(key))
        return entry

    @torch.no_grad()
    def _check(self, entry: Entry, key: GraphKey, probes: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless a fresh graph answers `probes` as eager mode does."""
        try:
            for call in probes:
                eager = self.eager_tensors(self._model.embed_multimodal(**call))
                batch = self._model.item_specs(call)
                items = tuple(range(len(batch.items)))
                with self._backend.ordered():
                    entry.buffers.load(self._model.replay_inputs(call, batch, items, key))
                    worst = largest_error(entry.graph.replay(), eager)
                if not worst <= max_error(eager):
                    raise CaptureError(
                        f"its graph differs from eager mode by {worst:.1e} on a probe"
                    )
        except Exception as error:
            entry.graph.close()
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(f"eager mode can't answer a probe: {error}") from error

    def eager_tensors(self, output: Any) -> list[torch.Tensor]:
        """Flat tensors of what ``embed_multimodal`` returned, as a graph would give them."""
        if self._facts.eager_returns == "items":
            return [torch.cat(list(output))]
        return flatten_outputs(output)

    def record(self, output: Any, num_tokens: int) -> tuple[OutputLayout, list[torch.Tensor]]:
        """Read the layout off an output for `num_tokens` tokens; also return its flat tensors."""
        if self._facts.eager_returns == "items":
            output = flatten_outputs(output)[0]
        rows, granularity = self._facts.layout == "rows", self._facts.token_granularity
        return OutputLayout.record(output, num_tokens, granularity, rows=rows)

    def _arena(self, key: GraphKey) -> BufferArena:
        arena = self.arenas.get(key.signature)
        if arena is None:
            largest = self._model.capture_inputs(self._largest_key(key))
            try:
                arena = BufferArena(largest, self._device)
            except torch.OutOfMemoryError as error:
                raise CaptureError(
                    f"no memory for buffers of {self._largest_budget} tokens: lower the budgets"
                ) from error
            self.arenas[key.signature] = arena
        return arena

    def _largest_key(self, key: GraphKey) -> GraphKey:
        budget = self._largest_budget
        segments = segment_tier(budget // self._facts.token_granularity)
        return GraphKey(
            budget,
            tuple(segments for _ in key.segment_capacity),
            tuple(budget for _ in key.max_seqlen),
            key.signature,
        )
