"""Graphs of exact calls: the encoder's way for what no budget can serve.

A call gets a graph when it comes a second time with the same sizes. The graph is broken around
what can't be captured, it has buffers of its own, and it serves only if it equals eager mode on two
different contents and is faster. The least recently used one makes room for another.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from mmgraph.config import GraphConfig
from mmgraph.errors import CaptureError, ConfigError, ReplayError
from mmgraph.graphs import (
    BreakableGraph,
    GraphBackend,
    Rebuild,
    capture_exact,
    clean_up,
    flatten,
)
from mmgraph.graphs.backend import ran_out_of_memory, without_frames
from mmgraph.log import WarnOnce, get_logger
from mmgraph.manager.caches import private_caches
from mmgraph.manager.contents import copied, varied
from mmgraph.manager.judge import Judge
from mmgraph.manager.trial import tried
from mmgraph.manager.verify import shortest
from mmgraph.protocol import SupportsExactGraphs
from mmgraph.stats import StatsRecorder
from mmgraph.types import ExactCall, GraphKey, Reason, Refusal

__all__ = ["ExactEntry", "ExactGraphs", "exact_graphs"]

_REMEMBERED_CALLS = 1024


def exact_graphs(
    config: GraphConfig,
    model: object,
    name: str,
    backend: GraphBackend,
    stats: StatsRecorder,
) -> ExactGraphs | None:
    """Make the place for graphs of exact calls, where the settings and the encoder want it.

    Raises:
        ConfigError: Nothing else is wanted, and the encoder hasn't what it takes.
    """
    if config.mode == "full":
        return None
    if isinstance(model, SupportsExactGraphs):
        return ExactGraphs(model, name, backend, stats)
    if config.mode == "piecewise":
        raise ConfigError(
            "mode='piecewise' needs exact_call() and exact_forward(), which "
            f"{type(model).__name__} doesn't have: see SupportsExactGraphs, or use mode='full'"
        )
    return None


class ExactEntry:
    """A graph of one call with all that belongs to it.

    Attributes:
        graph: The graph.
        seconds: What the capture took.
        compile_seconds: What compiled blocks added to that.
        replay_seconds: What the call takes, where that is measured.
        eager_seconds: What it takes in eager mode, likewise.
    """

    def __init__(
        self,
        graph: BreakableGraph,
        buffers: dict[str, torch.Tensor],
        rebuild: Rebuild,
        kept: object = None,
    ) -> None:
        self.graph = graph
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self.replay_seconds: float | None = None
        self.eager_seconds: float | None = None
        self._buffers = buffers
        self._rebuild = rebuild
        self._kept = kept  # what the graph reads and nobody else may hold

    @property
    def num_bytes(self) -> int:
        """Device memory of the graph and its buffers in bytes."""
        return self.graph.num_bytes + sum(b.nbytes for b in self._buffers.values())

    def run(self, contents: Mapping[str, torch.Tensor]) -> Any:
        """Replay for `contents`; the result is the caller's own.

        Raises:
            ReplayError: What ran between graphs gave another shape than at capture.
        """
        for name, tensor in contents.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        return self._rebuild([tensor.clone() for tensor in self.graph.replay()])


class ExactGraphs:
    """Captures and holds graphs of exact calls; used under the manager's lock.

    Args:
        model: The encoder.
        name: Where it sits in its model, for messages.
        backend: Captures the graphs.
        stats: Counts.
    """

    def __init__(
        self,
        model: SupportsExactGraphs,
        name: str,
        backend: GraphBackend,
        stats: StatsRecorder,
    ) -> None:
        self.entries: OrderedDict[GraphKey, ExactEntry] = OrderedDict()
        self._stats = stats
        self._model = model
        self._name = name
        self._backend = backend
        self._judge = Judge(model, name)
        self._nothing_to_try = False
        """Whether no block was recorded in another way when there was a choice."""
        self.at_once = False
        """Whether a call gets its graph the first time that it comes."""
        self._seen: OrderedDict[GraphKey, Reason | None] = OrderedDict()
        self._warn_once = WarnOnce(get_logger(__name__))

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs in bytes."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @torch.no_grad()
    def serve(
        self, mm_kwargs: Mapping[str, Any], reason: Reason, room: int
    ) -> tuple[Any, GraphKey]:
        """Return the output for a call, and the key of the graph that gave it.

        Args:
            mm_kwargs: The call.
            reason: Why no budget serves it.
            room: How many graphs there may be; 0 means that none may be captured now.

        Raises:
            Refusal: Eager mode has to; with `reason`, or a better one.
        """
        call = self._model.exact_call(mm_kwargs)
        key = GraphKey(call.num_tokens, exact=call.key)
        entry = self.entries.get(key)
        if entry is None:
            entry = self._capture_if_seen(key, call, reason, room)
        self.entries.move_to_end(key)
        try:
            with self._backend.ordered():
                return entry.run(call.contents), key
        except ReplayError as error:
            self._drop(key, Reason.DATA_DEPENDENT, str(error))
            raise Refusal(Reason.DATA_DEPENDENT) from error

    @torch.no_grad()
    def known(self, mm_kwargs: Mapping[str, Any]) -> tuple[Any, GraphKey] | None:
        """Like :meth:`serve`, but only from a graph that is there and has no breaks."""
        try:
            call = self._model.exact_call(mm_kwargs)
        except Refusal:
            return None
        key = GraphKey(call.num_tokens, exact=call.key)
        entry = self.entries.get(key)
        if entry is None or entry.graph.num_breaks:
            return None
        self.entries.move_to_end(key)
        try:
            with self._backend.ordered():
                return entry.run(call.contents), key
        except ReplayError:  # serve() knows what follows
            return None

    def capture(self, mm_kwargs: Mapping[str, Any], room: int) -> None:
        """Capture a graph for calls like this one now, where there are fewer than `room`.

        Raises:
            Refusal: The call can't have one.
            CaptureError: Its graph can't be captured, differs from eager mode, or is no faster.
        """
        call = self._model.exact_call(mm_kwargs)
        key = GraphKey(call.num_tokens, exact=call.key)
        if key in self.entries:
            return
        if len(self.entries) >= room:
            raise Refusal(Reason.GRAPH_LIMIT)
        self.entries[key] = self._capture(call)

    def shrink(self, room: int) -> None:
        """Free the least recently used graphs until there are at most `room`.

        Their calls have to come twice again: more sizes in turn than there is room for would
        otherwise be captured at each call.
        """
        while len(self.entries) > max(0, room):
            key = next(iter(self.entries))
            self._free(key)
            self._stats.evicted(1)
            self._seen.pop(key, None)

    def refuse(self, key: GraphKey) -> None:
        """Free the graph of `key`, for which there is no memory."""
        self._drop(key, Reason.MEMORY_LIMIT, Reason.MEMORY_LIMIT.value)

    def clear(self) -> None:
        """Free every graph, and forget what was seen."""
        for key in list(self.entries):
            self._free(key)
        self._seen.clear()

    def _capture_if_seen(
        self, key: GraphKey, call: ExactCall, reason: Reason, room: int
    ) -> ExactEntry:
        """Capture `key` if it was asked for before; remember it otherwise."""
        if key not in self._seen and not self.at_once:
            self._seen[key] = None
            if len(self._seen) > _REMEMBERED_CALLS:
                self._seen.popitem(last=False)
            raise Refusal(reason)
        failed = self._seen.get(key)
        if failed is not None or room < 1:
            raise Refusal(failed or reason)
        self.shrink(room - 1)
        try:
            entry = self.entries[key] = self._capture(call)
        except CaptureError as error:
            failed = _reason_of(error)
            self._drop(key, failed, str(error))
            raise Refusal(failed) from error
        return entry

    def _free(self, key: GraphKey) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._backend.settle()  # its memory may be read on a stream that isn't ours
            entry.graph.close()
            self._stats.forget([key])

    def _drop(self, key: GraphKey, reason: Reason, why: str) -> None:
        self._free(key)
        self._seen[key] = reason
        if reason is not Reason.NOT_FASTER:
            self._warn_once((reason, why), "%s runs in eager mode for %s: %s", self._name, key, why)

    def _capture(self, call: ExactCall) -> ExactEntry:
        """Capture and check a graph; whatever goes wrong, eager mode may still do."""
        try:
            # Plain tensors even inside inference mode: replays write them in every mode.
            with torch.inference_mode(False), torch.no_grad():
                model = None if self._nothing_to_try else self._model
                entry = tried(model, self._backend, lambda: self._captured(call))
                self._nothing_to_try = entry.graph.num_fast == 0
                self._compare_with_eager(entry, call)
                return entry
        except Exception as caught:
            error = caught
        if ran_out_of_memory(error):
            without_frames(error)
            clean_up()
        if isinstance(error, CaptureError):
            raise error
        raise CaptureError(f"its graph can't be captured: {error}") from error

    def _captured(self, call: ExactCall) -> ExactEntry:
        start = time.perf_counter()
        buffers, others = copied(call.contents), copied(call.others)
        constants = [v for v in others.values() if isinstance(v, torch.Tensor)]
        rebuilds: list[Rebuild] = []

        def run(views: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            tensors, rebuild = flatten(self._model.exact_forward(**views, **others))
            rebuilds.append(rebuild)
            return tensors

        with private_caches(self._model) as kept:
            graph = capture_exact(self._backend, run, buffers, constants)
        graph.num_bytes += kept.num_bytes
        entry = ExactEntry(graph, buffers, rebuilds[-1], kept)
        try:
            self._check(entry, call)
        except BaseException:
            graph.close()
            raise
        entry.seconds = time.perf_counter() - start
        return entry

    def _check(self, entry: ExactEntry, call: ExactCall) -> None:
        """Raise unless the graph equals eager mode on two contents."""
        for contents in (call.contents, {n: varied(t) for n, t in call.contents.items()}):
            probe = {**contents, **call.others}
            try:  # on copies: the tower may write to what it gets
                arguments = copied(probe)
                eager = flatten(self._model.embed_multimodal(**arguments))[0]
                with self._backend.ordered():
                    ours = flatten(entry.run(contents))[0]
            except Exception as error:
                raise CaptureError(f"a probe failed: {error}") from error
            if len(ours) != len(eager):
                raise CaptureError("its graph returns another structure than eager mode")
            self._judge.check(probe, ours, eager, lambda output: flatten(output)[0])

    def _compare_with_eager(self, entry: ExactEntry, call: ExactCall) -> None:
        """Raise unless the graph is faster than eager mode; it is closed then."""
        if not self._backend.is_timed:
            return
        try:
            arguments = copied({**call.contents, **call.others})
            ours_s = shortest(self._backend, lambda: entry.run(call.contents))
            eager_s = shortest(self._backend, lambda: self._model.embed_multimodal(**arguments))
            if ours_s >= eager_s:
                raise _NotFaster(
                    f"its graph takes {1e3 * ours_s:.2f} ms, eager mode {1e3 * eager_s:.2f} ms"
                )
            entry.replay_seconds, entry.eager_seconds = ours_s, eager_s
        except BaseException:
            entry.graph.close()
            raise


class _NotFaster(CaptureError):
    pass


def _reason_of(error: CaptureError) -> Reason:
    if isinstance(error, _NotFaster):
        return Reason.NOT_FASTER
    return Reason.OUT_OF_MEMORY if ran_out_of_memory(error) else Reason.CAPTURE_FAILED
