"""CUDA graphs: they follow their buffers, share a pool, and keep to their streams."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.cuda.graphs import is_current_stream_capturing
from transformers.utils.import_utils import is_cuda_stream_capturing

from mmgraph import freeze_gc_for_cudagraph_capture
from mmgraph.graphs.cuda import CudaBackend
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from tests.graphs.cuda_cases import Buffers, affine, assert_follows

pytestmark = pytest.mark.gpu


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
    told: list[bool] = []

    def run(buffers: Buffers) -> list[torch.Tensor]:
        stream = torch.cuda.current_stream()
        calls.append((is_current_stream_capturing(), stream == caller))
        told.append(is_cuda_stream_capturing())
        return affine(2)(buffers)

    caller = torch.cuda.current_stream()
    graph = backend.capture(run, {"x": x})
    graph.replay()
    assert calls == [(False, False), (False, False), (True, False)]
    assert told == [False] * 3  # a model goes the way of eager mode in all of them
    assert torch.cuda.current_stream() == caller


def test_what_reads_in_eager_mode_goes_the_way_of_a_capture(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    """As transformers does: unless a stream captures it looks whether a mask masks anything."""
    told: list[bool] = []

    def run(buffers: Buffers) -> list[torch.Tensor]:
        told.append(is_cuda_stream_capturing())
        if not told[-1] and bool((buffers["x"] == torch.inf).all()):
            return [buffers["x"]]
        return affine(2)(buffers)

    assert_follows(backend.capture(run, {"x": x}), x, 2)
    assert told == [False, False, True, True, True]


def test_what_only_cuda_sees_goes_the_way_of_a_capture_too(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    told: list[bool] = []

    def run(buffers: Buffers) -> list[torch.Tensor]:
        told.append(is_cuda_stream_capturing())
        if not told[-1]:
            torch.cuda.synchronize()
        return affine(2)(buffers)

    older = backend.capture(affine(3), {"x": x})
    assert_follows(backend.capture(run, {"x": x}), x, 2)
    assert told == [False] * 3 + [True] * 3
    assert_follows(older, x, 3)


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
        if not is_current_stream_capturing():
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
        frozen = frozen_by_somebody()
        backend.capture(affine(2), {"x": x})
        assert (gc.isenabled(), frozen_by_somebody()) == (enabled, frozen)
    finally:
        gc.enable()


def test_what_is_compiled_for_a_capture_is_compiled_before_it(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    """Also where a model has a mask in a capture and none elsewhere: other code for its blocks."""
    torch._dynamo.reset()

    def normalised(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(y.exp(), y.shape[-1:]).sin()

    compiled = torch.compile(normalised, dynamic=True)

    def run(buffers: Buffers) -> list[torch.Tensor]:
        captures = is_cuda_stream_capturing()
        if not captures and not bool(buffers["x"].isfinite().all()):
            return [buffers["x"]]
        guarded = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        return [(compiled if captures and not guarded else normalised)(buffers["x"])]

    with torch.no_grad():
        graph = backend.capture(run, {"x": x})
        x.uniform_()
        torch.testing.assert_close(graph.replay()[0], normalised(x), rtol=1e-4, atol=1e-4)


def test_the_collector_is_off_while_a_call_is_recorded(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    """A finaliser that it runs then can break the recording."""
    seen: list[tuple[bool, bool]] = []

    def run(buffers: Buffers) -> list[torch.Tensor]:
        seen.append((is_current_stream_capturing(), gc.isenabled()))
        return affine(2)(buffers)

    backend.capture(run, {"x": x})
    assert seen[-1] == (True, False)
    assert gc.isenabled()


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
