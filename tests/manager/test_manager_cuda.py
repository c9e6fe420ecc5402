"""The manager on CUDA graphs: streams, threads, other captures, and failures in the middle."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.cuda.graphs import is_current_stream_capturing

from mmgraph import EncoderCudaGraphManager, GraphConfig, GraphKey, Reason
from mmgraph.graphs import StaticBuffers
from tests.manager.engine import EngineEncoder, call_of, make_encoder

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def make_manager(encoder: EngineEncoder | None = None, **config: Any) -> EncoderCudaGraphManager:
    encoder = (make_encoder() if encoder is None else encoder).cuda()
    config = {"token_budgets": (8, 16, 32), **config}
    return EncoderCudaGraphManager(GraphConfig(**config), CUDA, torch.float32, encoder)


def cuda_call(lengths: Sequence[int], seed: int = 1) -> dict[str, Any]:
    """Patches on the GPU, lengths on the host: reading them there costs no wait."""
    call = call_of(lengths, seed)
    return {**call, "patches": call["patches"].cuda()}


def assert_right(
    outputs: Sequence[torch.Tensor], manager: EncoderCudaGraphManager, call: dict[str, Any]
) -> None:
    expected = manager.model.embed_multimodal(**call)
    assert len(outputs) == len(expected)
    for output, item in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, item, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
def test_every_division_of_a_call_is_right(capture: str) -> None:
    manager = make_manager(capture=capture)
    if capture == "upfront":
        manager.capture()
    for lengths in ([8], [6], [2, 4, 2], [32, 16, 8], [4, 30, 6, 20, 2], [4, 34, 6], [34], [4]):
        call = cuda_call(lengths)
        assert_right(manager.execute(call), manager, call)
    stats = manager.stats()
    assert stats.misses == {Reason.ABOVE_BUDGET: 2}
    assert stats.hits == stats.items - 2


def test_results_survive_later_replays_captures_and_clear() -> None:
    manager = make_manager()
    call = cuda_call([4, 2])
    kept = manager.execute(call)
    copies = [t.clone() for t in kept]
    for lengths in ([32], [16], [2] * 8, [4, 2]):
        manager.execute(cuda_call(lengths, seed=5))
    manager.clear()
    torch.cuda.empty_cache()
    torch.full((1 << 22,), float("nan"), device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert_right(manager.execute(call), manager, call)


def test_calls_on_several_streams_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    calls = [cuda_call([6, 2], seed) for seed in range(6)]
    expected = [manager.model.embed_multimodal(**call) for call in calls]
    manager.execute(calls[0])
    load = StaticBuffers.load

    def slow_load(self: StaticBuffers, pieces: Any) -> None:
        load(self, pieces)
        torch.cuda._sleep(50_000_000)  # the next call would overwrite the buffers by now

    monkeypatch.setattr(StaticBuffers, "load", slow_load)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for i, call in enumerate(calls):
        with torch.cuda.stream(streams[i % 3]):
            outputs.append(manager.execute(call))
    torch.cuda.synchronize()
    for ours, theirs in zip(outputs, expected, strict=True):
        for output, item in zip(ours, theirs, strict=True):
            torch.testing.assert_close(output, item, rtol=1e-4, atol=1e-5)


def test_threads_with_streams_of_their_own_get_their_own_results() -> None:
    manager = make_manager()
    sizes = [[4], [8, 2], [30], [34, 4], [2] * 7, [16, 16]]
    calls = [[cuda_call(s, seed=10 * t + i) for i, s in enumerate(sizes)] for t in range(3)]
    expected = [[manager.model.embed_multimodal(**call) for call in part] for part in calls]
    torch.cuda.synchronize()
    start, failures = threading.Barrier(3), list[str]()

    def work(thread: int) -> None:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for call, items in list(zip(calls[thread], expected[thread], strict=True)) * 5:
                try:
                    for output, item in zip(manager.execute(call), items, strict=True):
                        torch.testing.assert_close(output, item, rtol=1e-4, atol=1e-5)
                except Exception as error:
                    failures.append(f"{call['lengths'].tolist()}: {error}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.stats().items == 3 * 5 * sum(map(len, sizes))


@pytest.mark.parametrize("captured_before", [False, True])
def test_a_call_inside_somebody_elses_capture_is_part_of_it(captured_before: bool) -> None:
    manager = make_manager()
    call = cuda_call([6])
    manager.model.embed_multimodal(**call)
    if captured_before:
        manager.execute(call)
    before = manager.stats()
    ends = torch.arange(2, dtype=torch.int32, device=CUDA) * 6

    def on_the_device(**mm_kwargs: Any) -> list[torch.Tensor]:
        signature = (None, None, 1.0)
        return [manager.model._encode(mm_kwargs["patches"], ends, 6, signature)]

    manager.model.embed_multimodal, eager = on_the_device, manager.model.embed_multimodal
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        (output,) = manager.execute(call)
    manager.model.embed_multimodal = eager
    stats = manager.stats()
    assert stats.misses == {Reason.COMPILING: 1}
    assert (stats.hits, len(stats.graphs)) == (before.hits, len(before.graphs))
    call["patches"].normal_()
    graph.replay()
    assert_right([output], manager, call)
    assert_right(manager.execute(call), manager, call)
    assert manager.stats().hits == before.hits + 1


class FailsInCapture(EngineEncoder):
    """Can be warmed up, and reads on the host only while it is being captured."""

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        output = super().encoder_forward(buffers, key)
        if is_current_stream_capturing() and key.token_budget == 16:
            output.sum().item()
        return output


def test_a_capture_that_fails_in_the_middle_harms_no_other_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = FailsInCapture().requires_grad_(False).eval()
    manager = make_manager(encoder)
    small, failing, large = (cuda_call([n], seed=n) for n in (8, 16, 32))
    for call in (small, failing, large, small, failing, large):
        assert_right(manager.execute(call), manager, call)
    stats = manager.stats()
    assert stats.misses == {Reason.CAPTURE_FAILED: 1}  # once there is a larger graph, that serves
    assert stats.hits == 5
    assert len(caplog.records) == 1
    assert "the capture failed" in caplog.messages[0]
    torch.randn(3, device="cuda")


def test_weights_changed_in_place_are_followed() -> None:
    manager = make_manager()
    call = cuda_call([6, 2])
    before = [t.clone() for t in manager.execute(call)]
    with torch.no_grad():
        manager.model.merge.weight.mul_(-2)
    after = manager.execute(call)
    assert_right(after, manager, call)
    assert not torch.allclose(after[0], before[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replay_waits_for_nothing_on_the_host() -> None:
    manager = make_manager()
    call = cuda_call([6, 2])
    manager.execute(call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = manager.execute(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(outputs, manager, call)


def test_clear_gives_the_memory_back() -> None:
    manager = make_manager(token_budgets=(4096,))
    manager.capture()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert manager.stats().graph_bytes > 0
    manager.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < allocated
    assert torch.cuda.memory_reserved() < reserved
    assert manager.stats().graph_bytes == 0


@pytest.mark.timed
def test_whatever_is_found_faster_is_right() -> None:
    manager = make_manager()
    for lengths in ([8], [6], [2, 4, 2], [32, 16, 8], [4, 30, 6, 20, 2]):
        for seed in range(2):
            call = cuda_call(lengths, seed)
            assert_right(manager.execute(call), manager, call)
    stats = manager.stats()
    assert set(stats.misses) <= {Reason.NOT_FASTER}
    assert all(graph.replay_seconds for graph in stats.graphs)
