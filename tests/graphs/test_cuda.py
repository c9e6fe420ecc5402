"""CUDA graphs: they follow their buffers, share a pool, and a failure leaves no trace."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import CaptureError, freeze_gc_for_cudagraph_capture
from mmgraph.graphs.backend import CapturedGraph
from mmgraph.graphs.cuda import CudaBackend

pytestmark = pytest.mark.gpu

Buffers = Mapping[str, torch.Tensor]
WARM_UPS = 2
"""Calls of a callable before the one that is recorded."""


def affine(factor: float) -> Callable[[Buffers], list[torch.Tensor]]:
    """Elementwise, so that a replay is exactly the call; uses memory between input and output."""
    return lambda buffers: [((buffers["x"] * factor).sin() + 1).cos()]


def assert_follows(graph: CapturedGraph, x: torch.Tensor, factor: float) -> None:
    x.normal_()
    assert torch.equal(graph.replay()[0], affine(factor)({"x": x})[0])


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda"))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 64, device="cuda")


def test_a_replay_is_the_call_on_what_the_buffers_hold_now(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    graph = backend.capture(affine(2), {"x": x})
    for _ in range(3):
        assert_follows(graph, x, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_are_captured_with_their_weights_by_address(
    backend: CudaBackend, x: torch.Tensor, mode: type
) -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()
    with mode():
        graph = backend.capture(lambda buffers: [net(buffers["x"])], {"x": x})
    with torch.no_grad():
        for weight in (1.0, 0.5):
            net[0].weight.mul_(weight)
            x.normal_()
            torch.testing.assert_close(graph.replay()[0], net(x), rtol=1e-5, atol=1e-5)


def test_several_graphs_of_one_pool_replay_in_any_order(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    graphs = [(backend.capture(affine(f), {"x": x[: 64 - f]}), x[: 64 - f], f) for f in range(4)]
    for order in itertools.permutations(graphs):
        for graph, view, factor in order:
            assert_follows(graph, view, factor)


def test_graphs_of_one_backend_share_memory(backend: CudaBackend) -> None:
    x = torch.randn(1 << 24, device="cuda")

    def run(buffers: Buffers) -> list[torch.Tensor]:
        return [affine(3)(buffers)[0].sum()]

    first, second = (backend.capture(run, {"x": x}) for _ in range(2))
    assert first.num_bytes >= x.numel() * x.element_size()
    assert second.num_bytes < first.num_bytes // 4


def test_the_callable_is_warmed_up_on_another_stream_and_recorded_once(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    calls: list[tuple[bool, bool]] = []

    def run(buffers: Buffers) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream()
        calls.append((torch.cuda.is_current_stream_capturing(), stream == caller))
        return affine(2)(buffers)

    caller = torch.cuda.current_stream()
    graph = backend.capture(run, {"x": x})
    graph.replay()
    assert calls == [(False, False)] * WARM_UPS + [(True, False)]
    assert torch.cuda.current_stream() == caller


class Fails:
    """A callable that goes wrong from its call number `first` on."""

    def __init__(self, first: int, wrong: Callable[[torch.Tensor], Any]) -> None:
        self.calls = 0
        self.first = first
        self.wrong = wrong

    def __call__(self, buffers: Buffers) -> list[torch.Tensor]:
        self.calls += 1
        x = affine(5)(buffers)[0]
        if self.calls >= self.first:
            self.wrong(x)
        return [x]


def raise_value_error(_: torch.Tensor) -> None:
    raise ValueError("no such layer\nsecond line")


def raise_interrupt(_: torch.Tensor) -> None:
    raise KeyboardInterrupt


def draw_and_raise(x: torch.Tensor) -> None:
    torch.rand_like(x)
    raise ValueError("no such layer")


def draw_and_read(x: torch.Tensor) -> None:
    torch.nn.functional.dropout(x).sum().item()


def nest_a_stream(x: torch.Tensor) -> None:
    """Fork into a stream that never joins."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x * 2


FAILURES = [
    # while warming up
    pytest.param(1, raise_value_error, CaptureError, "no such layer", id="first call"),
    # under the guard
    pytest.param(2, raise_value_error, CaptureError, "no such layer", id="second call"),
    pytest.param(2, torch.Tensor.tolist, CaptureError, "host", id="seen by the guard"),
    # inside the capture
    pytest.param(
        3,
        raise_value_error,
        CaptureError,
        "^the capture failed: ValueError: no such layer$",
        id="third call",
    ),
    # where no guard is: the capture is invalidated by CUDA
    pytest.param(3, torch.Tensor.tolist, CaptureError, "the capture failed", id="read, unseen"),
    pytest.param(3, lambda x: x.sum().item(), CaptureError, "the capture failed", id="item"),
    pytest.param(
        3, lambda x: torch.cuda.synchronize(), CaptureError, "the capture failed", id="synchronize"
    ),
    pytest.param(3, nest_a_stream, CaptureError, "the capture failed", id="stream left unjoined"),
    # with the generator in use
    pytest.param(3, draw_and_raise, CaptureError, "no such layer", id="random, then an error"),
    pytest.param(3, draw_and_read, CaptureError, "the capture failed", id="random, then a read"),
    # not an Exception: passed on as it is
    pytest.param(1, raise_interrupt, KeyboardInterrupt, "^$", id="interrupt in warm-up"),
    pytest.param(3, raise_interrupt, KeyboardInterrupt, "^$", id="interrupt in the capture"),
]


@pytest.mark.parametrize(("first", "wrong", "error", "message"), FAILURES)
def test_a_failed_capture_leaves_no_trace(
    backend: CudaBackend,
    x: torch.Tensor,
    first: int,
    wrong: Callable[[torch.Tensor], Any],
    error: type[BaseException],
    message: str,
) -> None:
    older = backend.capture(affine(2), {"x": x})
    torch.cuda.manual_seed(7)
    expected = [torch.rand(5, device="cuda") for _ in range(2)]
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(5, device="cuda"), expected[0])
    collector = gc.isenabled(), gc.get_freeze_count()
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()

    with pytest.raises(error, match=message):
        backend.capture(Fails(first, wrong), {"x": x})

    assert not torch.cuda.is_current_stream_capturing()
    assert not backend.busy()
    assert (torch.cuda.current_stream(), torch.cuda.current_device()) == (stream, device)
    assert (gc.isenabled(), gc.get_freeze_count()) == collector
    assert torch.equal(torch.rand(5, device="cuda"), expected[1])
    torch.cuda.synchronize()
    assert_follows(older, x, 2)
    newer = backend.capture(affine(3), {"x": x})
    for graph, factor in ((newer, 3), (older, 2), (newer, 3)):
        assert_follows(graph, x, factor)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(5, device="cuda"), expected[0])


def test_failures_in_a_row_leave_no_trace(backend: CudaBackend, x: torch.Tensor) -> None:
    older = backend.capture(affine(2), {"x": x})
    for first in (3, 1, 3, 2, 3):
        with pytest.raises(CaptureError):
            backend.capture(Fails(first, lambda t: t.sum().item()), {"x": x})
        with pytest.raises(CaptureError):
            backend.capture(Fails(first, raise_value_error), {"x": x})
    newer = backend.capture(affine(3), {"x": x})
    assert_follows(newer, x, 3)
    assert_follows(older, x, 2)
    torch.randn(3, device="cuda")


def test_memory_of_a_failed_capture_comes_back(backend: CudaBackend) -> None:
    x = torch.randn(1 << 24, device="cuda")

    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def fail() -> None:
        with pytest.raises(CaptureError):
            backend.capture(Fails(3, raise_value_error), {"x": x})

    fail()
    before = used()
    for _ in range(4):
        fail()
    assert used() <= before + x.numel() * x.element_size() // 2


def test_closing_every_graph_and_capturing_again_works(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    for _ in range(3):
        graphs = [(backend.capture(affine(f), {"x": x}), f) for f in (2, 3)]
        for graph, factor in graphs:
            assert_follows(graph, x, factor)
        for graph, _ in graphs:
            graph.close()
            graph.close()  # a second call does nothing
        torch.cuda.empty_cache()


def test_closing_one_graph_leaves_the_others(backend: CudaBackend, x: torch.Tensor) -> None:
    graphs = {f: backend.capture(affine(f), {"x": x}) for f in (2, 3, 4)}
    graphs.pop(3).close()
    torch.cuda.empty_cache()
    torch.full((1 << 20,), float("nan"), device="cuda")
    for factor, graph in graphs.items():
        assert_follows(graph, x, factor)
    graphs[5] = backend.capture(affine(5), {"x": x})
    for factor, graph in graphs.items():
        assert_follows(graph, x, factor)


def test_a_closed_graph_can_not_be_replayed(backend: CudaBackend, x: torch.Tensor) -> None:
    graph = backend.capture(affine(2), {"x": x})
    graph.close()
    with pytest.raises(AssertionError, match="closed"):
        graph.replay()


def test_a_borrowed_pool_is_used_and_left_to_its_owner(x: torch.Tensor) -> None:
    backend, pool = CudaBackend(torch.device("cuda")), torch.cuda.graph_pool_handle()
    theirs = torch.cuda.CUDAGraph()
    affine(9)({"x": x})
    torch.cuda.synchronize()
    with torch.cuda.graph(theirs, pool=pool):
        (output,) = affine(9)({"x": x})
    backend.use_pool(pool)
    backend.use_pool(None)  # no pool named: the one in use stays
    for factor in (2, 3):
        graph = backend.capture(affine(factor), {"x": x})
        assert_follows(graph, x, factor)
        graph.close()
    x.normal_()
    theirs.replay()
    assert torch.equal(output, affine(9)({"x": x})[0])


def test_a_block_waits_for_the_last_one_on_another_stream(backend: CudaBackend) -> None:
    x = torch.zeros(1024, device="cuda")
    graph = backend.capture(lambda buffers: [buffers["x"] * 2 + 1], {"x": x})
    values = torch.tensor([[1.0], [2.0], [3.0]], device="cuda").expand(3, 1024).contiguous()
    results = torch.zeros(3, 1024, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for call, stream in enumerate((streams[0], streams[1], streams[0])):
        with torch.cuda.stream(stream), backend.ordered():
            x.copy_(values[call])
            torch.cuda._sleep(100_000_000)  # the next block would overwrite x by now
            results[call].copy_(graph.replay()[0])
    torch.cuda.synchronize()
    assert results[:, 0].tolist() == [3.0, 5.0, 7.0]
    assert torch.equal(results, (values * 2 + 1))


def test_a_block_left_by_an_error_is_waited_for_too(backend: CudaBackend) -> None:
    x, result = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def fail() -> None:
        with torch.cuda.stream(first), backend.ordered():
            torch.cuda._sleep(100_000_000)
            x.fill_(1)
            raise ValueError("x")

    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="x"):
        fail()
    with torch.cuda.stream(second), backend.ordered():
        result.copy_(x)
    torch.cuda.synchronize()
    assert (result == 1).all()


def test_a_capture_waits_for_the_work_of_its_caller(backend: CudaBackend) -> None:
    """The warm-up must not read a buffer that the caller's stream is still filling."""
    x, seen = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def run(buffers: Buffers) -> list[torch.Tensor]:
        if not torch.cuda.is_current_stream_capturing():
            seen.copy_(buffers["x"])
        return [buffers["x"] + 1]

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), freeze_gc_for_cudagraph_capture():  # no wait for the collector
        torch.cuda._sleep(400_000_000)
        x.fill_(1)
        backend.capture(run, {"x": x})
    torch.cuda.synchronize()
    assert (seen == 1).all()


def allocate_pinned() -> None:
    torch.empty(1 << 16, pin_memory=True).fill_(1)


def allocate_on_the_device() -> None:
    torch.ones(1 << 20, device="cuda").sum()


def copy_to_the_host() -> None:
    torch.ones(1 << 10, device="cuda").sum().item()


@pytest.mark.parametrize("work", [allocate_pinned, allocate_on_the_device, copy_to_the_host])
def test_another_thread_goes_on_during_a_capture(
    backend: CudaBackend, x: torch.Tensor, work: Callable[[], None]
) -> None:
    stop, failures = threading.Event(), []
    done = threading.Semaphore(0)

    def loop() -> None:
        stream = torch.cuda.Stream()
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    work()
                done.release()
        except Exception as error:
            failures.append(error)
            for _ in range(100):
                done.release()

    def run(buffers: Buffers) -> list[torch.Tensor]:
        half = buffers["x"] * 2
        while done.acquire(blocking=False):
            pass
        for _ in range(5):
            assert done.acquire(timeout=30)
        return [half.sin()]

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        graph = backend.capture(run, {"x": x})
    finally:
        stop.set()
        thread.join()
    assert failures == []
    x.normal_()
    assert torch.equal(graph.replay()[0], (x * 2).sin())


def test_busy_means_that_the_current_stream_is_being_captured(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    states = []
    affine(2)({"x": x})
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        affine(2)({"x": x})
        states.append(backend.busy())
        thread = threading.Thread(target=lambda: states.append(backend.busy()))
        thread.start()
        thread.join()
    assert states == [True, False]
    assert not backend.busy()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_capture_leaves_the_collector_as_it_is(
    backend: CudaBackend, x: torch.Tensor, enabled: bool
) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        frozen = gc.get_freeze_count()
        backend.capture(affine(2), {"x": x})
        assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, frozen)
    finally:
        gc.enable()


def test_a_capture_draws_no_random_number_of_the_user(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    before = torch.cuda.get_rng_state()
    backend.capture(affine(2), {"x": x})
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_default_device_is_none_of_a_captures_business(x: torch.Tensor) -> None:
    backend = CudaBackend(torch.device("cuda", 0))
    with torch.device("cpu"):
        graph = backend.capture(affine(2), {"x": x})
    assert_follows(graph, x, 2)
