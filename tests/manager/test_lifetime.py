"""Graphs, buffers and plans from one call to the next, and after ``clear``."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch

from mmgraph import EncoderBatch, EncoderCudaGraphManager, Reason, ReplayError
from tests.manager.engine import (
    BUDGETS,
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_manager,
)


def test_clear_frees_the_graphs_and_calls_capture_anew() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    call = call_of([4, 20])
    manager.execute(call)
    graphs = list(backend.graphs)
    (arena,) = map(weakref.ref, manager._store.arenas.values())
    manager.clear()
    manager.clear()
    gc.collect()
    assert arena() is None
    assert manager.stats().graphs == ()
    assert manager.memory_by_graph() == {}
    for graph in graphs:
        with pytest.raises(AssertionError, match="closed"):
            graph.replay()
    assert manager.is_captured()
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().hits == 4
    held = sum(graph.replays for graph in manager.stats().graphs)
    assert held == len(backend.graphs) - len(graphs)


def test_clear_ends_serving_in_up_front_mode_until_the_next_capture() -> None:
    manager = make_manager(capture="upfront")
    manager.capture()
    manager.clear()
    assert not manager.is_captured()
    manager.execute(call_of([4]))
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 1}
    manager.capture()
    manager.execute(call_of([4]))
    assert manager.stats().hits == 1


def count_plans(manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    planned, plan = list[int](), manager._planner.plan

    def counting(batch: EncoderBatch, graphs: Any) -> Any:
        planned.append(len(batch.items))
        return plan(batch, graphs)

    monkeypatch.setattr(manager._planner, "plan", counting)
    return planned


def test_a_call_of_known_sizes_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    manager.execute(call_of([4, 2]))
    planned = count_plans(manager, monkeypatch)
    manager.execute(call_of([4, 2], seed=2))
    assert planned == []
    manager.execute(call_of([2, 4]))  # another order is another plan
    assert planned == [2]


def test_a_new_graph_makes_old_plans_invalid() -> None:
    manager = make_manager(capture="upfront", max_items=1)
    call = call_of([4])
    manager.execute(call)
    manager.capture()
    manager.execute(call)
    assert (manager.stats().hits, manager.stats().misses) == (1, {Reason.NOT_CAPTURED: 1})


def test_the_cache_of_plans_is_bounded() -> None:
    class Idle(EngineEncoder):
        def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
            return []

    manager = make_manager(Idle(), capture="upfront")
    for count in range(1, 300):
        manager.execute(call_of([2] * count))
    assert manager.stats().calls == 299
    assert len(manager._plans._known) <= 256


@pytest.mark.parametrize("debug", [False, True])
def test_debugging_finds_a_buffer_that_moved(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMGRAPH_DEBUG", str(int(debug)))
    manager = make_manager()
    manager.execute(call_of([4]))
    manager.execute(call_of([4]))
    (entry,) = manager._store.entries.values()
    entry.buffers.views["ends"] = entry.buffers.views["ends"].clone()
    if not debug:
        manager.execute(call_of([4]))  # unseen
        return
    with pytest.raises(ReplayError, match="the static buffer 'ends' was captured at"):
        manager.execute(call_of([4]))


def test_buffers_are_allocated_once_for_all_budgets() -> None:
    manager = make_manager()
    for lengths in ([4], [32], [2] * 12, [16]):
        manager.execute(call_of(lengths))
    (arena,) = manager._store.arenas.values()
    assert arena.storage["patches"].shape[0] == BUDGETS[-1]
    for entry in manager._store.entries.values():
        for name, view in entry.buffers.views.items():
            assert view.data_ptr() == arena.storage[name].data_ptr()


def test_statistics_are_json() -> None:
    manager = make_manager(backend=MeasuredBackend())
    manager.execute(call_of([4, 34]))
    data = json.loads(json.dumps(manager.stats().to_dict()))
    assert (data["items"], data["hits"], data["misses"]) == (2, 1, {"ABOVE_BUDGET": 1})
    assert data["graphs"][0]["bytes"] == 1024
