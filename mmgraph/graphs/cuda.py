"""The backend on ``torch.cuda.CUDAGraph`` (NVIDIA, and ROCm under the same name).

Design note. A capture warms up on a side stream, then records on the same stream, so that what
libraries allocate for a stream exists before. The mode is "thread_local": another thread's
allocation (a data loader that pins memory) can't break it. ``torch.cuda.graph`` is not used: it
collects garbage and empties the cache at every entry.

What a reader would get wrong: a capture that fails leaves three things open in torch, and each is
put right here: the allocator still routes the stream's allocations into the pool, the default
generator still believes that it is being captured, and the CUDA error must be taken off.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import CapturedGraph, GraphBackend, Runnable

__all__ = ["CudaBackend"]

_WARMUP_RUNS = 2


class CudaGraph(CapturedGraph):
    """A CUDA graph with the outputs that it writes."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor], num_bytes: int
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self.num_bytes = num_bytes

    def replay(self) -> list[torch.Tensor]:
        assert self._graph is not None, "replay of a graph that was closed"
        self._graph.replay()
        return self._outputs

    def close(self) -> None:
        if self._graph is not None:
            self._outputs = []
            self._graph.reset()
            self._graph = None


class CudaBackend(GraphBackend):
    """Captures on one CUDA device, all graphs in one memory pool."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._pool: Any | None = None
        self._stream: torch.cuda.Stream | None = None
        self._last_use: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._lock = threading.RLock()

    def use_pool(self, pool: Any | None) -> None:
        if pool is not None:
            self._pool = pool

    def capture(self, run: Runnable, buffers: Mapping[str, torch.Tensor]) -> CapturedGraph:
        with self._lock, torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            if gc.isenabled():  # a capture of its own, outside a frozen block
                gc.collect()
                torch.cuda.empty_cache()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(self._stream):
                    return self._warm_up_and_record(run, buffers)
            finally:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _warm_up_and_record(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor]
    ) -> CapturedGraph:
        try:
            for _ in range(_WARMUP_RUNS):
                run(buffers)
            torch.cuda.synchronize(self._device)
        except Exception as error:
            raise CaptureError(f"the warm-up before a capture failed: {error}") from error
        before = _pool_bytes(self._device)
        graph = torch.cuda.CUDAGraph()
        with _undone_on_failure(self._device, self._pool):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run(buffers)
            finally:
                graph.capture_end()
        return CudaGraph(graph, outputs, max(0, _pool_bytes(self._device) - before))

    @contextmanager
    def ordered(self) -> Iterator[None]:
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if self._last_use is not None and self._last_use[0] != stream:
                stream.wait_event(self._last_use[1])
            try:
                yield
            finally:
                event = torch.cuda.Event() if self._last_use is None else self._last_use[1]
                event.record(stream)
                self._last_use = (stream, event)

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def _pool_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.current", 0))


@contextmanager
def _undone_on_failure(device: torch.device, pool: Any) -> Iterator[None]:
    """Turn any failure of a capture into a `CaptureError` and close what it left open."""
    generator = torch.cuda.default_generators[device.index]
    state = generator.clone_state()
    try:
        yield
    except Exception as error:
        generator.graphsafe_set_state(state)
        _close_allocation_to_pool(device, pool)
        raise CaptureError(f"the call can't be captured: {_root_message(error)}") from error


def _close_allocation_to_pool(device: torch.device, pool: Any) -> None:
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        end = getattr(torch._C, name, None)
        if end is not None:
            try:
                end(device.index, pool)
            except RuntimeError:  # it was closed already
                continue
            return


def _root_message(error: BaseException) -> str:
    # The error of capture_end hides the one that invalidated the capture: report the first.
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
