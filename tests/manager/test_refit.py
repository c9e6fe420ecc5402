"""Other budgets for a manager: what goes, what stays, and that results stay right."""

from __future__ import annotations

from typing import Any

import pytest

from mmgraph import ConfigError, EncoderCudaGraphManager, Reason
from tests.manager.engine import (
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)

ROUNDS = ([4], [16], [6, 8], [30], [2] * 5)


def budgets_held(manager: EncoderCudaGraphManager) -> list[int]:
    return sorted(record.key.token_budget for record in manager.stats().graphs)


def serve(manager: EncoderCudaGraphManager, lengths: list[int], **more: Any) -> None:
    call = call_of(lengths, **more)
    assert_items_equal(manager.execute(call), manager.model, call)  # type: ignore[arg-type]


def test_graphs_of_budgets_that_stay_are_kept_and_others_are_freed() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    for lengths in ([8], [16], [32]):
        serve(manager, lengths)
    kept = {key: e for key, e in manager._store.entries.items() if key.token_budget == 16}
    (arena,) = manager._store.arenas.values()
    manager.use_budgets((12, 16, 24))
    assert manager.budgets == (12, 16, 24)
    assert manager.stats().budgets == (12, 16, 24)
    assert manager._store.entries == kept
    graphs: list[Any] = backend.graphs
    assert [graph._module is None for graph in graphs] == [True, False, True]
    assert list(manager._store.arenas.values()) == [arena]  # never rebound under a live graph
    for lengths in ([16], [12], [24]):
        serve(manager, lengths)
    assert backend.captured == [8, 16, 32, 12, 24]
    for lengths in ROUNDS:
        serve(manager, lengths)
    assert set(budgets_held(manager)) == {12, 16, 24}
    for entry in manager._store.entries.values():
        entry.buffers.check_addresses()
        assert entry.buffers.views["patches"].data_ptr() == arena.storage["patches"].data_ptr()


def test_the_counts_of_graphs_that_went_are_forgotten_and_totals_stay() -> None:
    manager = make_manager()
    for lengths in ([8], [16]):
        serve(manager, lengths)
    manager.use_budgets((16,))
    stats = manager.stats()
    assert (stats.hits, stats.replays, stats.calls) == (2, 2, 2)
    assert {r.key.token_budget: r.replays for r in stats.graphs} == {16: 1}
    manager.use_budgets((8, 16))
    serve(manager, [8])
    assert {r.key.token_budget: r.replays for r in manager.stats().graphs} == {8: 1, 16: 1}


def test_where_the_largest_budget_grows_buffers_do_and_all_graphs_go() -> None:
    manager = make_manager()
    serve(manager, [16])
    (before,) = manager._store.arenas.values()
    manager.use_budgets((16, 64))
    assert (manager._store.entries, manager._store.arenas) == ({}, {})
    for lengths in ([64], [16], [40]):
        serve(manager, lengths)
    (after,) = manager._store.arenas.values()
    rows = [arena.storage["patches"].shape[0] for arena in (before, after)]
    assert rows == [32, 64]
    assert manager.stats().misses == {}


def test_buffers_that_are_large_enough_still_are_after_a_smaller_ladder() -> None:
    manager = make_manager()
    serve(manager, [8])
    (arena,) = manager._store.arenas.values()
    manager.use_budgets((8,))
    manager.use_budgets((8, 32))
    assert budgets_held(manager) == [8]
    serve(manager, [32])
    assert list(manager._store.arenas.values()) == [arena]


def test_buffers_that_no_graph_reads_are_freed_and_come_back_smaller() -> None:
    manager = make_manager()
    serve(manager, [32])
    manager.use_budgets((8, 12))
    assert manager._store.arenas == {}
    serve(manager, [8])
    (arena,) = manager._store.arenas.values()
    assert arena.storage["patches"].shape[0] == 12


def test_plans_made_before_are_dropped() -> None:
    manager = make_manager()
    call = call_of([8, 8])
    manager.execute(call)
    manager.use_budgets((20,))
    assert_items_equal(manager.execute(call), manager.model, call)  # type: ignore[arg-type]
    assert budgets_held(manager) == [20]
    assert manager.stats().padding == 4


def test_what_failed_is_forgotten_with_its_budget_or_if_it_was_for_memory() -> None:
    encoder = make_encoder()
    encoder.fails_at = 8
    manager = make_manager(encoder, mode="full")
    for lengths in ([8], [16]):
        manager.execute(call_of(lengths))
    assert set(manager._store.failed.values()) == {Reason.CAPTURE_FAILED}
    manager.use_budgets((8, 32))
    assert len(manager._store.failed) == 1  # it would fail again
    manager._store.failed = dict.fromkeys(manager._store.failed, Reason.OUT_OF_MEMORY)
    manager.use_budgets((8, 24))
    assert manager._store.failed == {}
    manager._store.failed = {}
    manager.execute(call_of([8]))
    manager.use_budgets((24,))
    assert manager._store.failed == {}


def test_captured_up_front_only_the_missing_ones_are_captured() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend, capture="upfront", max_items=1)
    manager.capture()
    manager.use_budgets((8, 20, 32))
    assert [key.token_budget for key in manager.keys_to_capture()] == [20]
    serve(manager, [16])  # not captured on use: the larger graph serves
    manager.capture()
    assert backend.captured == [32, 16, 8, 20]
    serve(manager, [18])
    assert manager.stats().misses == {}


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ((), "token_budgets is empty"),
        ((16, 8), "must ascend without repeats"),
        ((0, 8), "must be a positive integer"),
        ((7,), "must be multiples of 2"),
    ],
)
def test_budgets_that_do_not_fit_change_nothing(budgets: tuple[int, ...], message: str) -> None:
    manager = make_manager()
    serve(manager, [8])
    with pytest.raises(ConfigError, match=message):
        manager.use_budgets(budgets)
    assert manager.budgets == (8, 16, 32)
    assert budgets_held(manager) == [8]
