"""Graphs of exactly some tokens make room for each other when the traffic changes."""

from __future__ import annotations

from typing import Any

import pytest

from mmgraph import CaptureError, EncoderCudaGraphManager
from mmgraph.manager.demand import Demand
from tests.manager.engine import MeasuredBackend, assert_items_equal, call_of, make_manager

CONFIG: dict[str, Any] = {"max_graphs": 4, "exact_after": 2, "token_budgets": (8, 32)}
"""Two graphs of budgets, and two of exactly some tokens."""


def serve(manager: EncoderCudaGraphManager, *calls: list[int]) -> None:
    for seed, lengths in enumerate(calls):
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), manager.model, call)


def graphs(manager: EncoderCudaGraphManager) -> set[int]:
    return {graph.key.token_budget for graph in manager.stats().graphs}


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demand halves every ten calls."""
    monkeypatch.setattr("mmgraph.manager.demand._HALF_LIFE", 10)


@pytest.mark.usefixtures("forgetful")
def test_a_new_size_takes_the_place_of_one_that_comes_no_more() -> None:
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20]] * 4)
    assert graphs(manager) == {18, 20, 32}
    serve(manager, *[[22]] * 30)
    assert graphs(manager) == {20, 22, 32}  # of the two, 18 was asked for longer ago
    stats = manager.stats()
    assert stats.evictions == 1
    assert stats.misses == {}
    assert stats.hits == stats.items == 38
    assert stats.padding == 14 + 12 + 9 * 10  # asked at the 2nd call and again at the 10th
    serve(manager, *[[26], [22]] * 40)
    assert graphs(manager) == {22, 26, 32}
    assert manager.stats().evictions == 2


@pytest.mark.usefixtures("forgetful")
def test_sizes_that_take_turns_leave_each_other_alone() -> None:
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20], [22], [26]] * 25)
    assert graphs(manager) == {18, 20, 32}
    assert manager.stats().evictions == 0


@pytest.mark.usefixtures("forgetful")
def test_budgets_keep_their_graphs() -> None:
    manager = make_manager(**CONFIG)
    serve(manager, [8], [32], *[[18], [20]] * 3, *[[22]] * 40)
    assert graphs(manager) == {8, 20, 22, 32}
    assert manager.stats().evictions == 1


@pytest.mark.usefixtures("forgetful")
def test_where_nothing_may_give_way_nobody_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(max_graphs=2, exact_after=2, token_budgets=(8, 32))
    serve(manager, [8], [32], [18], [18])
    monkeypatch.setattr(Demand, "victim", lambda *_: pytest.fail("asked again"))
    serve(manager, *[[18]] * 40)
    assert graphs(manager) == {8, 32}


@pytest.mark.usefixtures("forgetful")
def test_it_is_asked_again_after_some_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20]] * 20)
    asked: list[int] = []
    monkeypatch.setattr(Demand, "victim", lambda _, key, *__: asked.append(key.token_budget))
    serve(manager, *[[22], [18], [20]] * 40)
    assert asked == [22] * 5  # the 2nd time, the 10th, ..., the 34th


class Odd(MeasuredBackend):
    """Can't capture 22 tokens."""

    attempts = 0

    def capture(self, run: Any, buffers: Any, like: Any = None) -> Any:
        if buffers["patches"].shape[0] == 22:
            self.attempts += 1
            raise CaptureError("22 is odd in its way")
        return super().capture(run, buffers, like)


@pytest.mark.usefixtures("forgetful")
def test_one_that_cannot_be_captured_takes_a_place_once() -> None:
    backend = Odd()
    manager = make_manager(backend=backend, **CONFIG)
    serve(manager, *[[18], [20]] * 4, *[[22]] * 40)
    assert graphs(manager) == {20, 32}
    serve(manager, [18], *[[22]] * 40)
    assert graphs(manager) == {18, 20, 32}
    assert backend.attempts == 1
    assert manager.stats().evictions == 1
    assert manager.stats().misses == {}
