"""`estimate()`: what `capture()` would take, measured on graphs of which nothing remains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import mmgraph.manager.upfront
from mmgraph import (
    CaptureError,
    EncoderBatch,
    EncoderCudaGraphManager,
    EncoderItemSpec,
    GraphConfig,
    GraphKey,
    attach,
)
from mmgraph.graphs import CapturedGraph, GraphBackend
from mmgraph.graphs.backend import Runnable
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from mmgraph.graphs.trace import TraceBackend
from mmgraph.manager import estimate
from mmgraph.recipes import load_recipe
from tests.manager.engine import PATCH, EngineEncoder, call_of, make_encoder, make_manager


class SizedBackend(TraceBackend):
    """Its graphs take `size(nth, rows)` bytes.

    Attributes:
        captured: Rows of each capture.
        open: Graphs that weren't closed.
    """

    def __init__(self, size: Callable[[int, int], int]) -> None:
        super().__init__()
        self.size = size
        self.captured: list[int] = []
        self.open: list[CapturedGraph] = []

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: object = None
    ) -> CapturedGraph:
        rows = buffers["patches"].shape[0]
        graph = super().capture(run, buffers, like)
        graph.num_bytes = self.size(len(self.captured), rows)
        self.captured.append(rows)
        self.open.append(graph)
        close = graph.close

        def closing() -> None:
            self.open.remove(graph)
            close()

        graph.close = closing  # type: ignore[method-assign]
        return graph


LADDER = tuple(range(8, 104, 8))


def shares_the_largest(nth: int, rows: int) -> int:
    return 100_000 if nth == 0 else 2_000 if nth == 1 else 300


def sized(
    monkeypatch: pytest.MonkeyPatch, size: Callable[[int, int], int], **config: Any
) -> tuple[EncoderCudaGraphManager, list[SizedBackend]]:
    """A manager whose graphs have sizes, and the backends that estimates make."""
    made: list[SizedBackend] = []

    def select(name: str, device: torch.device) -> GraphBackend:
        made.append(SizedBackend(size))
        return made[-1]

    monkeypatch.setattr(mmgraph.manager.upfront, "select_backend", select)
    config = {"token_budgets": LADDER, "max_items": 1, **config}
    return make_manager(make_encoder(max_tokens=128), SizedBackend(size), **config), made


@pytest.mark.parametrize("size", [shares_the_largest, lambda nth, rows: 5_000, lambda nth, rows: 0])
def test_it_is_what_capture_takes_from_three_graphs(
    monkeypatch: pytest.MonkeyPatch, size: Callable[[int, int], int]
) -> None:
    manager, made = sized(monkeypatch, size)
    expected = manager.estimate()
    (backend,) = made
    assert backend.captured == [96, 48, 8]
    assert backend.open == []
    assert manager.capture() == pytest.approx(expected, rel=0.02)
    assert expected > 0
    assert manager.estimate() == 0  # there is nothing left to capture


def test_nothing_of_it_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, made = sized(monkeypatch, shares_the_largest, capture="upfront")
    stats, state = manager.stats(), torch.get_rng_state()
    manager.estimate()
    assert manager.stats() == stats
    assert not manager.is_captured()
    assert (manager._store.entries, manager._store.arenas, manager._store.failed) == ({}, {}, {})
    assert made[0].open == []
    assert manager.backend.captured == []
    assert torch.equal(torch.get_rng_state(), state)
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)


def test_graphs_and_buffers_that_there_are_already_are_not_counted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, _ = sized(monkeypatch, shares_the_largest)
    everything = manager.estimate()
    manager.execute(call_of([96]))
    (arena,) = manager._store.arenas.values()
    graphs = dict(manager._store.entries)
    # A pool of its own: the next largest stands for the largest.
    assert manager.estimate() == everything - 300 - arena.num_bytes
    assert manager._store.entries == graphs
    assert manager.execute(call_of([96]))
    assert manager.stats().hits == 2


def test_max_graphs_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, made = sized(monkeypatch, lambda nth, rows: 5_000, max_graphs=2)
    assert manager.estimate() == manager.capture()
    assert made[0].captured == [96, 88]


def test_each_signature_has_buffers_and_a_largest_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def examples(budget: int, max_items: int) -> list[EncoderBatch]:
        item = EncoderItemSpec(budget, (1,), (budget,))
        shape = torch.Size((PATCH,))
        return [EncoderBatch((item,), (shape, torch.float32, scale)) for scale in (1.0, 2.0)]

    monkeypatch.setattr(EngineEncoder, "_examples", lambda self, *sizes: examples(*sizes))
    manager, made = sized(monkeypatch, lambda nth, rows: 5_000)
    expected = manager.estimate()
    assert made[0].captured == [96, 48, 8] * 2
    assert expected == manager.capture()
    assert len(manager._store.arenas) == 2


def test_what_can_not_be_captured_is_left_out_or_raised() -> None:
    encoder = make_encoder()
    encoder.fails_at = 16
    manager = make_manager(encoder)
    assert manager.estimate() == manager.capture()
    encoder = make_encoder()
    encoder.fails_above = 16
    with pytest.raises(CaptureError, match="no kernel for 32 tokens"):
        make_manager(encoder).estimate()


class HungryEncoder(EngineEncoder):
    runs_out_above = 16

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        if key.token_budget > self.runs_out_above:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().encoder_forward(buffers, key)


def test_without_memory_for_the_largest_it_is_what_the_smaller_ones_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = HungryEncoder().requires_grad_(False).eval()
    manager = make_manager(encoder, capture="upfront")
    expected = manager.estimate()
    # Nothing runs in eager mode because of an estimate.
    assert [r for r in caplog.records if r.name.startswith("mmgraph")] == []
    assert manager.capture() == expected > 0
    encoder.runs_out_above = 0
    with pytest.raises(CaptureError, match="out of memory"):
        make_manager(encoder).estimate()


def test_managers_that_share_a_backend_share_a_pool_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, made = sized(monkeypatch, shares_the_largest)
    config = {"token_budgets": LADDER, "max_items": 1}
    second = make_manager(make_encoder(max_tokens=128), first.backend, **config)
    alone = SizedBackend(shares_the_largest)
    third = make_manager(make_encoder(max_tokens=128), alone, **config)
    assert estimate([first.upfront, second.upfront]) < 2 * first.estimate()
    assert [len(backend.captured) for backend in made] == [6, 3]
    made.clear()
    assert estimate([first.upfront, third.upfront]) == 2 * first.estimate()
    assert [len(backend.captured) for backend in made] == [3, 3, 3]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_on_trace_an_attached_model_takes_its_static_buffers(device: str) -> None:
    model = load_recipe("clip:tiny").build_model(device=device)
    with attach(model, GraphConfig(row_budgets=(1, 2, 4), capture="lazy")) as handle:
        expected = handle.estimate()
        assert handle.stats().graphs == ()
        if device == "cpu":
            assert expected == 4 * 3 * 56 * 56 * 4
        assert handle.capture() == pytest.approx(expected, rel=0.15)
        assert handle.estimate() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["clip", "qwen2_5_vl"])
def test_on_a_gpu_it_is_within_15_percent_and_gives_everything_back(recipe: str) -> None:
    model = load_recipe(f"{recipe}:tiny").build_encoder(device="cuda", dtype=torch.bfloat16)
    config = GraphConfig(
        row_budgets=(1, 2, 4, 8, 16, 32, 64),
        token_budgets=(256, 512, 1024, 2048, 4096, 8192),
    )
    with attach(model, config) as handle:
        handle.estimate()  # workspaces of the capture stream stay, for the next capture

        def used() -> tuple[int, int]:
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        before = used()
        expected = handle.estimate()
        assert used() == before
        assert handle.capture() == pytest.approx(expected, rel=0.15)
