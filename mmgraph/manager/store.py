"""The graphs of one encoder by key: capture, check, free. The manager decides which and when."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs import BufferArena, CapturedGraph, GraphBackend, StaticBuffers, clean_up
from mmgraph.graphs.backend import ran_out_of_memory, without_frames
from mmgraph.log import WarnOnce, get_logger
from mmgraph.manager.outputs import Collector, OutputLayout, flatten_outputs
from mmgraph.manager.verify import largest_error, max_error, shortest
from mmgraph.policy import segment_tier
from mmgraph.protocol import SupportsEncoderCudaGraph, SupportsTrial
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
        backend: Captures the graphs.
        device: Where the buffers are.
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
        self.backend = backend
        self.device = device
        self._model = model
        self._facts = facts
        self._largest_budget = largest_budget
        self._warn_once = WarnOnce(get_logger(__name__))

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs and static buffers in bytes."""
        graphs = sum(entry.graph.num_bytes for entry in self.entries.values())
        return graphs + sum(arena.num_bytes for arena in self.arenas.values())

    def twin(self, backend: GraphBackend) -> GraphStore:
        """An empty store for the same encoder on another backend."""
        return GraphStore(self._model, self._facts, backend, self.device, self._largest_budget)

    def clear(self) -> None:
        """Free every graph and buffer, and forget what failed."""
        self.backend.settle()
        for entry in self.entries.values():
            entry.graph.close()
        self.entries.clear()
        self.arenas.clear()
        self.failed.clear()

    def use_budgets(self, budgets: tuple[int, ...]) -> list[GraphKey]:
        """Free the graphs of other budgets than the ascending `budgets`; return their keys.

        Buffers never grow under live graphs: where they are too small, all graphs go.
        """
        grows = budgets[-1] > self._largest_budget
        gone = [key for key in self.entries if grows or key.token_budget not in budgets]
        if gone:
            self.backend.settle()
        for key in gone:
            self.entries.pop(key).graph.close()
        read = {key.signature for key in self.entries}
        for signature in self.arenas.keys() - read:
            del self.arenas[signature]
        if not self.arenas:
            self._largest_budget = budgets[-1]
        for key, reason in list(self.failed.items()):
            if key.token_budget not in budgets or reason is Reason.OUT_OF_MEMORY:
                del self.failed[key]
        return gone

    def drop(self, key: GraphKey, reason: Reason) -> None:
        """Free the graph of `key`, which isn't to be captured again because of `reason`."""
        self.backend.settle()
        self.entries.pop(key).graph.close()
        self.failed[key] = reason

    def seconds(self, key: GraphKey) -> float:
        """Seconds of a replay of `key`.

        Graphs share their buffers: what another one left there may lead its own out of bounds.
        """
        with self.backend.ordered():
            self._arena(key).views(self._model.capture_inputs(key))  # fills them
        return shortest(self.backend, self.entries[key].graph.replay)

    def capture(self, key: GraphKey) -> CaptureError | None:
        """Capture `key`; on failure remember that, warn once and return the error."""
        self.failed.pop(key, None)
        error = self.attempt(key)
        if error is not None:
            no_memory = ran_out_of_memory(error)
            self.failed[key] = Reason.OUT_OF_MEMORY if no_memory else Reason.CAPTURE_FAILED
            # Its text only: whoever keeps log records must not keep the frames of a failed capture.
            why = str(error)
            self._warn_once(
                key.signature, "%s runs in eager mode for %s: %s", self._facts.name, key, why
            )
        return error

    def attempt(self, key: GraphKey) -> CaptureError | None:
        """Capture `key` and say nothing; where memory runs out, free what the attempt left."""
        try:
            self.entries[key] = self._capture(key)
            return None
        except CaptureError as caught:
            error = caught
        if not any(other.signature == key.signature for other in self.entries):
            self.arenas.pop(key.signature, None)  # buffers that no graph reads
        if ran_out_of_memory(error):
            without_frames(error)
            clean_up()
        return error

    def _capture(self, key: GraphKey) -> Entry:
        """Capture `key`; the first time also without what is on trial, and keep the faster one."""
        model = self._model
        if not (self.backend.is_timed and isinstance(model, SupportsTrial) and model.on_trial):
            return self._capture_checked(key)
        with model.without_options():
            plain = self._capture_checked(key)
        try:
            entry = self._capture_checked(key)
        except CaptureError as error:
            model.decide(str(error), failed=True)
            return plain
        seconds, plain_seconds = (shortest(self.backend, e.graph.replay) for e in (entry, plain))
        faster = seconds < plain_seconds
        kept, dropped = (entry, plain) if faster else (plain, entry)
        kept.graph.num_bytes += dropped.graph.num_bytes  # the pool keeps what either took
        dropped.graph.close()
        ms, plain_ms = 1e3 * seconds, 1e3 * plain_seconds
        model.decide(None if faster else f"{ms:.2f} ms, as they are {plain_ms:.2f} ms")
        return kept

    def _capture_checked(self, key: GraphKey) -> Entry:
        start = time.perf_counter()
        try:
            with self.backend.ordered():  # the examples go where other graphs may still be reading
                buffers = self._arena(key).views(self._model.capture_inputs(key))
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                f"no memory for buffers of {self._largest_budget} tokens: lower the budgets"
            ) from error
        recorded: list[OutputLayout] = []

        def run(views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            layout, tensors = self.record(self._model.encoder_forward(views, key), key.token_budget)
            recorded.append(layout)
            return tensors

        with torch.inference_mode():
            graph = self.backend.capture(run, buffers.views)
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
                collector = Collector(entry.layout, batch)
                with self.backend.ordered():
                    entry.buffers.load(self._model.replay_inputs(call, batch, items, key))
                    collector.add(items, entry.graph.replay())
                worst = largest_error(collector.results, eager)
                if not worst <= max_error(eager):
                    raise CaptureError(
                        f"its graph differs from eager mode by {worst:.1e} on a probe"
                    )
        except BaseException as error:
            entry.graph.close()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
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
            arena = BufferArena(largest, self.device)
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
