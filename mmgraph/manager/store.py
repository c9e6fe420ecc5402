"""The graphs of one encoder by key: captured, timed, freed. The manager decides which and when."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs import BufferArena, GraphBackend, clean_up
from mmgraph.graphs.backend import ran_out_of_memory, without_frames
from mmgraph.log import WarnOnce, get_logger
from mmgraph.manager.capture import Capturer, Entry
from mmgraph.manager.eager_times import EagerTimes
from mmgraph.manager.limit import Limit
from mmgraph.manager.prices import Measured
from mmgraph.manager.probes import Probes
from mmgraph.manager.ranges import Ranges
from mmgraph.manager.slopes import Slope
from mmgraph.manager.verify import shortest
from mmgraph.policy import segment_tier
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey, Reason

__all__ = ["GraphStore"]

_logger = get_logger(__name__)
_NO_ROOM = (Reason.OUT_OF_MEMORY, Reason.MEMORY_LIMIT)


class GraphStore:
    """Captures and holds the graphs of an encoder; used under the manager's lock.

    Attributes:
        entries: Graphs by key.
        failed: Keys that can't be captured, and why.
        too_large: Bytes of graphs for which there was no room.
        arenas: Static buffers by call signature, each at its largest size.
        backend: Captures the graphs.
        device: Where the buffers are.
        probes: What fresh graphs have to answer.
        eager_times: What calls take in eager mode.
        limit: How much memory there may be, and who else uses some of it.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        facts: EncoderFacts,
        backend: GraphBackend,
        device: torch.device,
        largest_budget: int,
        max_bytes: int | None = None,
    ) -> None:
        self.entries: dict[GraphKey, Entry] = {}
        self.failed: dict[GraphKey, Reason] = {}
        self.too_large: dict[GraphKey, int] = {}
        self.arenas: dict[Hashable, BufferArena] = {}
        self.backend = backend
        self.device = device
        self._model = model
        self._facts = facts
        self._largest_budget = largest_budget
        self.probes = Probes(model, facts, backend)
        self._capturer = Capturer(model, facts, backend, self.probes)
        self.eager_times = EagerTimes(model, facts, backend, self.probes)
        self.limit = Limit(max_bytes)
        self._retained = 0
        self._squares: dict[GraphKey, int] = {}
        self._slopes: dict[Hashable, Slope] = {}
        self._measured: Measured | None = None
        self._range = Ranges(facts.name)
        self._warn_once = WarnOnce(_logger)

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
        for key in list(self.entries):
            self._close(key)
        self.arenas.clear()
        self.failed.clear()
        self.too_large.clear()
        self.eager_times.clear()
        self._slopes.clear()
        self._measured = None
        self._capturer.model_changed()

    def use_budgets(self, budgets: tuple[int, ...]) -> list[GraphKey]:
        """Free the graphs of other budgets than the ascending `budgets`; return their keys.

        Buffers never grow under live graphs: where they are too small, all graphs go.
        """
        grows = budgets[-1] > self._largest_budget
        gone = [key for key in self.entries if grows or key.token_budget not in budgets]
        if gone:
            self.backend.settle()
        for key in gone:
            self._close(key)
        self._free_unread_buffers()
        if not self.arenas:
            self._largest_budget = budgets[-1]
        for key, reason in list(self.failed.items()):
            if key.token_budget not in budgets or reason in _NO_ROOM:
                del self.failed[key]
        self._measured = None
        return gone

    def drop(self, key: GraphKey, reason: Reason) -> None:
        """Free the graph of `key`, which isn't to be captured again because of `reason`."""
        self.free([key])
        self.failed[key] = reason

    def free(self, keys: Sequence[GraphKey]) -> None:
        """Free the graphs of `keys`, and buffers that no graph reads any more."""
        self.backend.settle()
        for key in keys:
            self._close(key)
        self._free_unread_buffers()
        self.limit.freed(keys)

    @property
    def is_over(self) -> bool:
        """Whether more memory is taken than there may be."""
        return self.limit.is_exceeded_by(self.num_bytes + self._retained)

    def has_room(self, key: GraphKey, without: Sequence[GraphKey] = ()) -> bool:
        """Whether there is memory for `key`, as far as is known, once the graphs `without` go."""
        needed = max(1, self.too_large.get(key, 0))
        freed = sum(self.entries[k].graph.num_bytes for k in without)
        return not self.limit.is_exceeded_by(self.num_bytes - freed + needed)

    def _close(self, key: GraphKey) -> None:
        graph = self.entries.pop(key).graph
        self.eager_times.alike.pop(key, None)
        self._squares.pop(key, None)
        self._measured = None
        if self.backend.name == "cuda":  # a pool gives memory back with its last graph only
            self._retained = self._retained + graph.num_bytes if self.entries else 0
        graph.close()

    def _free_unread_buffers(self) -> None:
        read = {key.signature for key in self.entries}
        for signature in self.arenas.keys() - read:
            del self.arenas[signature]

    @torch.no_grad()
    def seconds(self, key: GraphKey) -> float:
        """Seconds of a replay of `key` for a call that fills it, as far as one is known.

        Graphs share their buffers: what another one left there may lead its own out of bounds.
        """
        probes = self.probes.of(key)
        return self._seconds(key, probes[0].call if probes else None)

    def _seconds(self, key: GraphKey, call: Mapping[str, Any] | None) -> float:
        entry = self.entries[key]
        with self.backend.ordered():
            if call is None:
                self._arena(key).views(self._model.capture_inputs(key))  # fills them
            else:
                batch = self._model.item_specs(call)
                items = tuple(range(len(batch.items)))
                entry.buffers.load(self._model.replay_inputs(call, batch, items, key))
        return shortest(self.backend, entry.graph.replay)

    def capture(self, key: GraphKey) -> CaptureError | None:
        """Capture `key`; on failure remember that, warn once and return the error."""
        with self.probes.remembered():
            return self._capture(key)

    def _capture(self, key: GraphKey) -> CaptureError | None:
        self.failed.pop(key, None)
        with self._range("capture", key):
            error = self.attempt(key)
        self._measured = None
        if error is None:
            error = self._refused(key) if self.is_over else self._measured_or_freed(key)
        else:
            no_memory = ran_out_of_memory(error)
            self.failed[key] = Reason.OUT_OF_MEMORY if no_memory else Reason.CAPTURE_FAILED
            # Its text only: whoever keeps log records must not keep the frames of a failed capture.
            why = str(error)
            self._warn_once(
                key.signature, "%s runs in eager mode for %s: %s", self._facts.name, key, why
            )
        return error

    def _refused(self, key: GraphKey) -> CaptureError | None:
        """Free the graph of `key` if there still isn't room for it when others have given way."""
        self.limit.reclaim()
        if not self.is_over:
            return self._measured_or_freed(key)
        takes = (self.num_bytes + self._retained) / 2**20
        size = self.entries[key].graph.num_bytes
        if key in self.too_large:  # although others had made room
            self.failed[key] = Reason.MEMORY_LIMIT
        self.too_large[key] = size
        self.free([key])
        if self.is_over:  # the pool keeps what the attempt took: what comes back fits without it
            self.failed[key] = Reason.MEMORY_LIMIT
            self.free(list(self.entries))
        most = (self.limit.max_bytes or 0) / 2**20
        text = f"graphs would take {takes:.1f} MiB, but max_graph_bytes is {most:.1f} MiB"
        self._warn_once("limit", "%s: no graph for %s: %s", self._facts.name, key, text)
        return CaptureError(text)

    @property
    def measured(self) -> Measured:
        """What graphs and eager mode were measured to take; the same object until graphs change."""
        if self._measured is None:
            seconds = {key: entry.replay_seconds for key, entry in self.entries.items()}
            replays = {key: s for key, s in seconds.items() if s is not None}
            times = self.eager_times
            self._measured = Measured(
                replays,
                times.seconds,
                times.alike,
                dict(self._squares),
                {signature: slope.value for signature, slope in self._slopes.items()},
                {signature: slope.value for signature, slope in times.slopes.items()},
            )
        return self._measured

    def _measured_or_freed(self, key: GraphKey) -> CaptureError | None:
        """Time a fresh graph; one that can't be timed is none to serve."""
        try:
            self._measure(key)
            return None
        except Exception as caught:  # whatever it is, eager mode may still do
            error = CaptureError(f"its graph can't be timed: {type(caught).__name__}: {caught}")
            error.__cause__ = caught
        no_memory = ran_out_of_memory(error)
        self.drop(key, Reason.OUT_OF_MEMORY if no_memory else Reason.CAPTURE_FAILED)
        if no_memory:
            without_frames(error)
            clean_up()
        self._warn_once("timing", "%s: no graph for %s: %s", self._facts.name, key, str(error))
        return error

    def _measure(self, key: GraphKey) -> None:
        """Time a fresh graph, and eager mode on the calls that it was checked with."""
        if not self.backend.is_timed:
            return
        seconds = self.seconds(key)
        if self.eager_times.measure(key, seconds) < seconds:  # rare: not for a moment's hitch
            seconds = min(seconds, self.seconds(key))
            self.eager_times.measure(key, seconds, again=True)
        self._compare_probes(key, seconds)
        self.entries[key].replay_seconds = seconds
        self._measured = None

    @torch.no_grad()
    def _compare_probes(self, key: GraphKey, seconds: float) -> None:
        """Note what a graph that took `seconds` for its first probe takes for the second one."""
        calls = [probe.call for probe in self.probes.of(key)]
        if not calls:
            return
        held = [sum([i.squares for i in self._model.item_specs(c).items]) for c in calls]
        self._squares[key] = held[0]
        slope = self._slopes.setdefault(key.signature, Slope())
        if held[1:] and slope.hears(held[0] - held[1]):
            slope.add(seconds - self._seconds(key, calls[1]), held[0] - held[1])

    def attempt(self, key: GraphKey) -> CaptureError | None:
        """Capture `key` and say nothing; where memory runs out, free what the attempt left."""
        try:
            entry = self.entries[key] = self._capturer.capture(key, self._arena)
            mib = entry.graph.num_bytes / 2**20
            name, seconds = self._facts.name, entry.seconds
            _logger.info("%s: captured %s in %.2f s, %.1f MiB", name, key, seconds, mib)
            return None
        except CaptureError as caught:
            error = caught
        except Exception as caught:  # whatever it is, eager mode may still do
            error = CaptureError(f"{type(caught).__name__}: {caught}")
            error.__cause__ = caught
        if not any(other.signature == key.signature for other in self.entries):
            self.arenas.pop(key.signature, None)  # buffers that no graph reads
        if ran_out_of_memory(error):
            without_frames(error)
            self.probes.forget()
            clean_up()
        return error

    def _arena(self, key: GraphKey) -> BufferArena:
        arena = self.arenas.get(key.signature)
        if arena is None:
            largest = self._model.capture_inputs(self._largest_key(key))
            try:
                arena = BufferArena(largest, self.device)
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
