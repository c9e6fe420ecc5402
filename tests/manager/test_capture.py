"""Capture: up front or on use, up to a limit, and what happens when it fails."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mmgraph import BufferSpec, CaptureError, EncoderCudaGraphManager, GraphKey, Reason
from mmgraph.graphs import BufferArena, CapturedGraph
from mmgraph.graphs.backend import Runnable
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from mmgraph.types import EncoderBatch, EncoderItemSpec
from tests.manager.engine import (
    BUDGETS,
    CPU,
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)


def test_capture_records_every_budget_largest_first_and_returns_its_bytes() -> None:
    backend, seen = MeasuredBackend(), list[GraphKey]()
    manager = make_manager(backend=backend, max_items=4)
    keys = manager.keys_to_capture()
    num_bytes = manager.capture(progress=seen.append)
    (arena,) = manager._store.arenas.values()
    assert num_bytes == 1024 * len(keys) + arena.num_bytes
    assert seen == keys
    assert [key.token_budget for key in keys] == sorted(
        [key.token_budget for key in keys], reverse=True
    )
    assert {key.token_budget for key in keys} == set(BUDGETS)
    assert backend.captured == [key.token_budget for key in keys]
    assert manager.memory_by_graph() == dict.fromkeys(keys, 1024)
    assert {key.segment_capacity for key in keys} == {(1,), (4,)}


def test_large_budgets_have_one_graph_for_one_item_and_for_many() -> None:
    budgets = (16, 4092, 4096, 8192)
    manager = make_manager(backend=MeasuredBackend(), max_items=4, token_budgets=budgets)
    bounds = [(k.token_budget, k.segment_capacity, k.max_seqlen) for k in manager.keys_to_capture()]
    assert [b for b in bounds if b[0] >= 4096] == [(8192, (4,), (8192,)), (4096, (4,), (4096,))]
    small = [(tokens, segments) for tokens, segments, _ in bounds if tokens < 4096]
    assert small == [(4092, (1,)), (4092, (4,)), (16, (1,)), (16, (4,))]


@pytest.mark.parametrize("longest", [1500, 4096])
def test_what_one_graph_takes_is_captured_for_no_call(longest: int) -> None:
    """In lazy mode as well: a large budget that was captured is there for one item and for many."""
    manager = make_manager(max_items=4, token_budgets=(4096,))
    manager.capture()
    graphs = manager.stats().graphs
    for lengths in ([4096], [3600], [longest, 2000, 500], [4000]):
        manager.execute(call_of(lengths))
    assert [g.key for g in manager.stats().graphs] == [g.key for g in graphs]
    assert manager.stats().hits == 6
    assert not manager.stats().misses


def test_examples_of_other_lengths_have_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bound far above the true length costs attention time."""

    def examples(self: Any, budget: int, max_items: int) -> Sequence[EncoderBatch]:
        return [
            EncoderBatch((EncoderItemSpec(n, (1,), (n,)),) * count, None)
            for n, count in ((budget, 1), (budget // 2, 2), (budget // 32, 32))
        ]

    monkeypatch.setattr(EngineEncoder, "_examples", examples)
    manager = make_manager(max_items=32, token_budgets=(8192,))
    keys = manager.keys_to_capture()
    assert [(k.segment_capacity, k.max_seqlen) for k in keys] == [
        ((1,), (8192,)),
        ((2,), (4096,)),
        ((32,), (256,)),
    ]


def test_capture_again_does_nothing() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.capture()
    graphs, captured = manager.stats().graphs, list(backend.captured)
    seen = list[GraphKey]()
    assert manager.keys_to_capture() == []
    assert manager.capture(progress=seen.append) == 0
    assert (seen, backend.captured) == ([], captured)
    assert manager.stats().graphs == graphs


def test_capture_hands_the_pool_on() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.capture((0, 7))
    assert backend.pools == [(0, 7)]


def test_capture_leaves_the_collector_and_the_random_numbers_as_they_were() -> None:
    state = torch.get_rng_state()
    make_manager().capture()
    assert torch.equal(torch.get_rng_state(), state)
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)


def test_what_was_captured_up_front_serves_every_call_that_it_fits() -> None:
    manager = make_manager(capture="upfront", max_items=4)
    assert not manager.is_captured()
    manager.capture()
    assert manager.is_captured()
    graphs = len(manager.stats().graphs)
    for lengths in ([2], [8], [32], [2, 2, 2], [10, 6, 4, 2], [30, 2], [32, 16, 8]):
        assert_items_equal(manager.execute(call_of(lengths)), manager.model, call_of(lengths))
    stats = manager.stats()
    assert stats.misses == {}
    assert len(stats.graphs) == graphs


def test_nothing_is_captured_on_use_in_up_front_mode() -> None:
    manager = make_manager(capture="upfront")
    call = call_of([4, 8])
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 2}
    assert manager.stats().graphs == ()


def test_more_items_than_were_captured_for_take_more_replays() -> None:
    manager = make_manager(capture="upfront", max_items=2)
    manager.capture()
    call = call_of([2] * 4)
    assert_items_equal(manager.execute(call), manager.model, call)
    stats = manager.stats()
    assert (stats.hits, stats.replays, stats.misses) == (4, 2, {})


def test_a_graph_is_captured_when_a_call_first_needs_it() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    assert manager.is_captured()
    assert backend.captured == []
    for lengths in ([4], [6], [30], [4], [28]):
        manager.execute(call_of(lengths))
    assert backend.captured == [8, 8, 32]  # seqlen tiers 4 and 8, then the largest
    assert manager.stats().hits == 5


def test_a_looser_graph_of_the_same_budget_is_used_instead_of_a_capture() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.execute(call_of([8]))
    manager.execute(call_of([6]))  # the same tiers
    manager.execute(call_of([4]))  # half the bound on lengths
    assert backend.captured == [8]
    assert manager.stats().hits == 3


def test_max_graphs_sends_other_sizes_to_eager_mode() -> None:
    manager = make_manager(max_graphs=1)
    small, large = call_of([8]), call_of([30, 6])
    for call in (small, large, small):
        assert_items_equal(manager.execute(call), manager.model, call)
    stats = manager.stats()
    assert len(stats.graphs) == 1
    assert stats.hits == 2 + 1  # the small one twice, and the item that its graph holds
    assert stats.misses == {Reason.GRAPH_LIMIT: 1}


def test_max_graphs_ends_a_capture_up_front() -> None:
    manager = make_manager(capture="upfront", max_graphs=2)
    manager.capture()
    budgets = [graph.key.token_budget for graph in manager.stats().graphs]
    assert budgets == [32, 32]
    manager.capture()
    assert len(manager.stats().graphs) == 2


def test_capture_logs_how_many_graphs_there_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmgraph")
    make_manager(max_graphs=2).capture()
    assert caplog.messages[-1].startswith("engine: 2 graphs captured")


def test_no_memory_for_buffers_means_eager_mode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    manager, call = make_manager(), call_of([4, 2])
    monkeypatch.setattr("mmgraph.manager.store.BufferArena", no_memory)
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.OUT_OF_MEMORY: 2}
    assert "no memory for buffers of 32 tokens: lower the budgets" in caplog.text


class HungryBackend(MeasuredBackend):
    """Has no memory for graphs of more than `rows` rows, and says what the last attempt holds."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.held: weakref.ref[torch.Tensor] | None = None

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: object = None
    ) -> CapturedGraph:
        assert self.held is None or self.held() is None
        graph, activation = super().capture(run, buffers, like), torch.ones(4)
        if self.captured[-1] > self.rows:
            self.held = weakref.ref(activation)
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise CaptureError(f"the capture failed: {error}") from error
        return graph


def test_without_memory_smaller_budgets_are_tried_and_nothing_is_held() -> None:
    backend = HungryBackend(8)
    manager = make_manager(backend=backend, capture="upfront", max_items=1)
    arena_bytes = BufferArena(specs_of_largest(manager), CPU).num_bytes
    assert manager.capture() == 1024 + arena_bytes
    assert backend.captured == [32, 16, 8]
    assert list(manager._store.failed.values()) == [Reason.OUT_OF_MEMORY] * 2
    assert manager.is_captured()
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)
    backend.rows = 32
    manager.capture()
    assert manager._store.failed == {}


def specs_of_largest(manager: EncoderCudaGraphManager) -> dict[str, BufferSpec]:
    key = manager.keys_to_capture()[0]
    return manager.model.capture_inputs(manager._store._largest_key(key))


def test_without_memory_for_any_budget_the_first_failure_is_raised_in_the_end() -> None:
    backend = HungryBackend(0)
    manager = make_manager(backend=backend, capture="upfront", max_items=1)
    with pytest.raises(CaptureError, match="CUDA out of memory"):
        manager.capture()
    assert backend.captured == [32, 16, 8]
    assert not manager.is_captured()
    assert manager._store.arenas == {}
    call = call_of([4])
    assert_items_equal(manager.execute(call), manager.model, call)


def test_without_memory_on_use_the_reason_is_counted() -> None:
    manager = make_manager(backend=HungryBackend(8))
    for lengths in ([16], [8], [16]):
        call = call_of(lengths)
        assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.OUT_OF_MEMORY: 2}
    assert manager.stats().hits == 1


def test_buffers_that_no_graph_reads_are_freed() -> None:
    encoder = make_encoder()
    encoder.fails_above = 0
    manager = make_manager(encoder)
    manager.execute(call_of([4]))
    assert manager._store.arenas == {}
    encoder.fails_above = None
    manager.clear()
    manager.execute(call_of([4]))
    assert len(manager._store.arenas) == 1


def test_a_failed_capture_is_counted_warned_about_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder, backend = make_encoder(), MeasuredBackend()
    encoder.fails_above = 8
    manager = make_manager(encoder, backend)
    calls = [call_of(lengths) for lengths in ([16], [32], [16, 6], [8])]
    for call in calls:
        assert_items_equal(manager.execute(call), encoder, call)
    attempts = list(backend.captured)
    assert attempts == [16, 32, 32, 8]  # two tables of segments for 32 tokens
    for call in calls:
        assert_items_equal(manager.execute(call), encoder, call)
    assert backend.captured == attempts
    stats = manager.stats()
    assert stats.hits == 2
    assert stats.misses == {Reason.CAPTURE_FAILED: 8}
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("engine runs in eager mode for 16 tokens, segments <= 1")
    assert "ValueError: no kernel for 16 tokens" in warnings[0]


def test_a_budget_that_fails_leaves_the_others_captured() -> None:
    encoder = make_encoder()
    encoder.fails_above = 16
    manager = make_manager(encoder, MeasuredBackend(), capture="upfront", max_items=1)
    with pytest.raises(CaptureError, match="no kernel for 32 tokens"):
        manager.capture()  # the largest comes first: there is nothing yet
    assert not manager.is_captured()
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)
    manager = make_manager(encoder, MeasuredBackend(), max_items=1)
    manager.execute(call_of([8]))
    assert manager.capture() == 1024  # the buffers were there
    assert {graph.key.token_budget for graph in manager.stats().graphs} == {8, 16}


def test_a_larger_graph_serves_what_can_not_be_captured() -> None:
    encoder = make_encoder()
    encoder.fails_at = 16
    manager = make_manager(encoder)
    for lengths in ([16], [32], [16]):
        call = call_of(lengths)
        assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
    assert manager.stats().hits == 2


def test_capture_tries_again_what_had_failed() -> None:
    encoder = make_encoder()
    encoder.fails_above = 16
    manager = make_manager(encoder, MeasuredBackend(), max_items=1)
    call = call_of([30])
    manager.execute(call)
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
    encoder.fails_above = None
    manager.capture()
    assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().hits == 1
