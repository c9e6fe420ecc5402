"""The backend on ``torch.cuda.CUDAGraph`` (NVIDIA, and ROCm under the same name).

Design note. A capture warms up on a side stream, then records on the same stream, so that what
libraries allocate for a stream exists before. The mode is "thread_local": another thread's
allocation (a data loader that pins memory) can't break it. ``torch.cuda.graph`` is not used: it
collects garbage and empties the cache at every entry.

What a reader would get wrong, each seen on torch 2.11:

* A capture that fails leaves the default generator believing that it is being captured, so the
  next random number raises: its state is put back. It also leaves its pool in "recording" for
  good, whatever is ended by hand: the pool is given up (graphs in it live on, and their memory
  goes with the last of them) and the next capture starts another.
* A pool handle is dead once the last graph in it is gone. So the backend counts its graphs.
* cuBLAS keeps a workspace (32 MiB on Hopper) for every stream it was ever used on, and a captured
  graph holds its address. Two graphs that may run at the same time must not share it, so each
  backend captures on a stream of its own; but a stream that no graph needs any more is used again,
  or each attach would leave a workspace behind.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import CapturedGraph, GraphBackend, Runnable, ran_out_of_memory
from mmgraph.graphs.gc_freeze import clean_up, undisturbed
from mmgraph.graphs.guard import BrokenCapture, CaptureGuard
from mmgraph.graphs.shared import CaptureStreams, Pool
from mmgraph.graphs.ways import Ways, seems_to_capture
from mmgraph.graphs.weak import weak_view

__all__ = ["CudaBackend", "CudaGraph", "abandon"]

_Graph = TypeVar("_Graph", bound=CapturedGraph)
_REMEMBERED = 256


class CudaGraph(CapturedGraph):
    """A CUDA graph with the outputs that it writes."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: list[torch.Tensor],
        num_bytes: int,
        on_close: Callable[[], None],
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self._on_close = on_close
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
            on_close, self._on_close = self._on_close, _nothing  # a closed graph holds no backend
            on_close()


_capture_streams = CaptureStreams()
_one_at_a_time = threading.RLock()
"""What warms up and allocates for one capture could break another thread's."""


class CudaBackend(GraphBackend):
    """Captures on one CUDA device, all graphs in one memory pool."""

    name = "cuda"
    is_timed = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._ways = Ways()
        self._passed: set[tuple[Hashable, bool]] = set()
        """Captures that the guard had nothing against, and the way that they went."""
        self._pool: Pool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._live = 0
        self._inside = 0
        self._lock = threading.RLock()
        self._order = _Order(self._device, self._lock)

    def synchronize(self) -> None:
        # Not the device: that includes streams on which other threads may be recording.
        torch.cuda.current_stream(self._device).synchronize()

    @property
    def keeps_memory(self) -> bool:
        return self._pool is not None and not self._pool.is_dead

    def use_pool(self, pool: Any | None) -> None:
        if pool is not None:
            self._pool = Pool(pool, borrowed=True)

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: Hashable = None
    ) -> CapturedGraph:
        return self.either_way(lambda: self._capture(run, buffers, like))

    def either_way(self, capture: Callable[[], _Graph]) -> _Graph:
        """Capture one way or the other; a failure leaves the random numbers as they were."""
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.clone_state()
        try:
            return self._ways.take(lambda: self.retried(capture))
        except BaseException:
            generator.graphsafe_set_state(state)
            raise

    def retried(self, capture: Callable[[], _Graph]) -> _Graph:
        """Capture; where memory runs out, clean up and try once more."""
        try:
            return capture()
        except CaptureError as error:
            if not ran_out_of_memory(error):
                raise
        clean_up()
        return capture()

    def _capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: Hashable
    ) -> CapturedGraph:
        """Capture under the guard, unless a capture like this one has passed it on this way.

        What it does only at some sizes is left to CUDA, which refuses it at the price of the pool.
        """
        place = (like, seems_to_capture())
        if place in self._passed:
            try:
                with self.on_capture_stream():
                    return self._warm_up_and_record(run, buffers)
            except BrokenCapture:  # not so like after all: the guard can say what it is
                self._passed.discard(place)
        with self.on_capture_stream():
            graph = self._warm_up_and_record(run, buffers, CaptureGuard())
        if like is not None:
            if len(self._passed) >= _REMEMBERED:
                self._passed.clear()
            self._passed.add(place)
        return graph

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Be alone on the capture stream, in order with the caller's own, and have a pool."""
        with ExitStack() as stack:
            for context in (self._lock, _one_at_a_time, torch.cuda.device(self._device)):
                stack.enter_context(context)
            self._have_pool()
            stack.enter_context(undisturbed())
            if self._stream is None:
                self._stream = _capture_streams.take(self._device)
            stream = self._stream
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._inside += 1
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                self._inside -= 1
                torch.cuda.current_stream(self._device).wait_stream(stream)
                self._give_stream_back_if_unused()

    def _have_pool(self) -> None:
        if self._pool is not None and self._pool.is_dead:
            # torch keeps what it held until memory runs out; the next pool can't use that.
            torch.cuda.empty_cache()
            self._pool = None
        if self._pool is None:
            self._pool = Pool(torch.cuda.graph_pool_handle())

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Start recording into `graph`; on the capture stream only."""
        assert self._pool is not None, "on_capture_stream() makes one"
        graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def end(
        self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor], num_bytes: int = 0
    ) -> CudaGraph:
        """Take over a graph whose recording has ended."""
        pool = self._pool
        assert pool is not None, "on_capture_stream() makes one"
        # Weak: in the pool the next capture may use their memory, as the next replay does.
        views = [weak_view(tensor) for tensor in outputs]
        captured = CudaGraph(graph, views, num_bytes, partial(self._closed, pool))
        pool.opened()
        self._live += 1
        return captured

    def _warm_up_and_record(
        self,
        run: Runnable,
        buffers: Mapping[str, torch.Tensor],
        guard: CaptureGuard | None = None,
    ) -> CapturedGraph:
        def runs() -> None:
            run(buffers)
            if guard is not None:
                with guard:
                    run(buffers)

        self.warm_up(runs)
        before = self.reserved_bytes()
        with self.undone_on_failure():
            graph = torch.cuda.CUDAGraph()
            try:
                self.begin(graph)
                outputs = run(buffers)
                self.about_to_end()
                graph.capture_end()
            except BaseException:
                abandon(graph)
                raise
            return self.end(graph, outputs, max(0, self.reserved_bytes() - before))

    def warm_up(self, runs: Callable[[], object]) -> None:
        """Do what comes before a recording.

        Raises:
            CaptureError: It failed.
        """
        try:
            runs()
            self.synchronize()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"the warm-up before a capture failed: {error}") from error

    def _closed(self, pool: Pool) -> None:
        with self._lock:
            pool.closed()
            self._live -= 1
            self._give_stream_back_if_unused()

    def _give_stream_back_if_unused(self) -> None:
        """Let others capture on the stream once no graph of ours may still be running."""
        if self._live == 0 and self._inside == 0 and self._stream is not None:
            self._order.make_wait(self._stream)
            _capture_streams.give_back(self._stream)
            self._stream = None

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Turn any failure of a capture into a `CaptureError` and put right what it left."""
        generator = torch.cuda.default_generators[self._device.index]
        state, outer = generator.clone_state(), sys.exc_info()[1]
        try:
            yield
        except BaseException as error:
            generator.graphsafe_set_state(state)
            self._pool = None
            if not isinstance(error, Exception):
                raise
            root = _root(error, outer)
            kind = BrokenCapture if isinstance(root, RuntimeError) else CaptureError
            if ran_out_of_memory(error):
                kind = CaptureError
            raise kind(f"the capture failed: {_message(root)}") from error

    def reserved_bytes(self) -> int:
        """Device memory that torch holds, pools included."""
        return int(torch.cuda.memory_stats(self._device).get("reserved_bytes.all.current", 0))

    def ordered(self) -> AbstractContextManager[None]:
        return self._order

    def settle(self) -> None:
        self._order.settle()

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _Order(AbstractContextManager[None]):
    """Makes whoever enters wait, on their own stream, for what was done inside before."""

    def __init__(self, device: torch.device, lock: threading.RLock) -> None:
        self._device = device
        self._lock = lock
        self._event: torch.cuda.Event | None = None
        self._last_stream: int | None = None

    def make_wait(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for what was done inside last."""
        if self._event is not None:
            stream.wait_event(self._event)

    def settle(self) -> None:
        """Let the host wait for what was done inside last."""
        if self._event is not None and not torch.cuda.is_current_stream_capturing():
            self._event.synchronize()

    def __enter__(self) -> None:
        self._lock.acquire()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if stream != self._last_stream and self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._last_stream = stream

    def __exit__(self, *_: object) -> None:
        try:
            if self._event is None:
                self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a recording that may be open, after an error that says more than this one could."""
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is nothing in it
        graph.capture_end()


def _nothing() -> None:
    pass


def _root(error: BaseException, outer: BaseException | None) -> BaseException:
    # The error of capture_end hides the one that invalidated the capture: report the first, but
    # not what the caller was dealing with.
    while error.__context__ is not None and error.__context__ is not outer:
        error = error.__context__
    return error


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
