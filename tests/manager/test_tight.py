"""Graphs of exactly some tokens make room for each other when the traffic changes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from mmgraph import (
    CaptureError,
    EncoderBatch,
    EncoderCudaGraphManager,
    EncoderFacts,
    EncoderItemSpec,
)
from mmgraph.manager.demand import Demand
from mmgraph.manager.store import GraphStore
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)

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
    """Demand halves every fifty calls."""
    monkeypatch.setattr("mmgraph.manager.demand._HALF_LIFE", 50)


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
    assert stats.padding == 14 + 12 + 25 * 10  # asked each eight calls from the 2nd on
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
    monkeypatch.setattr(Demand, "is_clearly_more", lambda *_: pytest.fail("asked again"))
    serve(manager, *[[18]] * 40)
    assert graphs(manager) == {8, 32}


@pytest.mark.usefixtures("forgetful")
def test_it_is_asked_again_after_some_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20]] * 20)
    asked: list[int] = []
    monkeypatch.setattr(
        Demand, "is_clearly_more", lambda _, key, *__: asked.append(key.token_budget)
    )
    serve(manager, *[[22], [18], [20]] * 40)
    assert asked == [22] * 4  # the 10th time, the 18th, the 26th and the 34th


@pytest.mark.usefixtures("forgetful")
def test_what_a_use_saves_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 comes less often than 20, and saves so much more that 20 goes."""
    monkeypatch.setattr(
        "mmgraph.manager.prices.saving", lambda key, *_: 100.0 if key.token_budget == 18 else 1.0
    )
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20], [20]] * 4, *[[22]] * 40)
    assert graphs(manager) == {18, 22, 32}


@pytest.mark.usefixtures("forgetful")
def test_what_a_call_runs_in_does_not_give_way_to_another_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph of 26 tokens serves 24, until one of 24 takes the place of another."""
    monkeypatch.setattr("mmgraph.manager.demand._SIGMA", -9.0)
    manager = make_manager(**{**CONFIG, "max_graphs": 2, "exact_after": 1})
    serve(manager, [32], [26])
    assert graphs(manager) == {26, 32}
    serve(manager, *[[24]] * 20)
    assert graphs(manager) == {26, 32}


@pytest.mark.usefixtures("forgetful")
def test_nothing_gives_way_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the pool would keep it."""
    monkeypatch.setattr(GraphStore, "has_room", lambda _, key, gone=(): key.token_budget != 22)
    manager = make_manager(**CONFIG)
    serve(manager, *[[18], [20]] * 2, *[[22]] * 60)
    assert graphs(manager) == {18, 20, 32}
    assert manager.stats().evictions == 0


class Keeping(MeasuredBackend):
    """Its pool keeps its memory, and goes as a whole when a graph too many was captured."""

    name = "cuda"


def test_an_attempt_that_frees_everything_leaves_no_plan_without_its_graphs() -> None:
    config: dict[str, Any] = {"max_graphs": 4, "exact_after": 2, "token_budgets": (32,)}
    manager = make_manager(backend=Keeping(), **config)
    serve(manager, [18])
    most = manager._store.num_bytes + 512
    backend = Keeping()
    manager = make_manager(backend=backend, max_graph_bytes=most, **config)
    serve(manager, *[[18]] * 6)
    assert 18 in backend.captured
    assert manager.stats().items == 6


class Divides(EngineEncoder):
    """Items above every budget may run in parts."""

    def divided(self, batch: EncoderBatch, max_tokens: int) -> EncoderBatch:
        items: list[EncoderItemSpec] = []
        for item in batch.items:
            left, is_rest = item.num_tokens, False
            while left:
                part = min(left, max_tokens)
                items.append(EncoderItemSpec(part, (1,), (part,), is_rest=is_rest))
                left, is_rest = left - part, True
        return EncoderBatch(tuple(items), batch.signature)

    def encoder_facts(self) -> EncoderFacts:
        return dataclasses.replace(super().encoder_facts(), uniform_graphs=True)


def test_a_plan_for_parts_that_frees_graphs_leaves_the_whole_servable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Divides().requires_grad_(False).eval()
    encoder.load_state_dict(make_encoder().state_dict())
    config: dict[str, Any] = {"max_graphs": 2, "exact_after": 2, "token_budgets": (32,)}
    manager = make_manager(encoder, min_hits=500, mode="full", **config)
    serve(manager, [20, 2], [20, 4])
    assert graphs(manager) == {20}
    plan, freed = manager._plans.plan, list[Any]()

    def frees(batch: EncoderBatch) -> Any:
        made = plan(batch)
        if any(item.is_rest for item in batch.items):
            freed.extend(manager._store.entries)
            manager._store.free(list(manager._store.entries))
        return made

    monkeypatch.setattr(manager._plans, "plan", frees)
    serve(manager, [20, 40])
    assert [key.token_budget for key in freed] == [20]
    stats = manager.stats()
    assert stats.items == stats.hits + sum(stats.misses.values()) == 6


def test_many_sizes_that_come_alike_take_no_turns() -> None:
    """The least and the most frequent lately are so by chance."""
    numbers = random.Random(7)
    manager = make_manager(max_graphs=8, exact_after=2, token_budgets=(64,))
    sizes = range(4, 64, 2)
    serve(manager, *[[numbers.choice(sizes)] for _ in range(600)])
    assert manager.stats().evictions == 0
    assert len(graphs(manager)) == 5


def test_a_change_of_weight_follows_in_time() -> None:
    numbers = random.Random(8)
    manager = make_manager(max_graphs=4, exact_after=2, token_budgets=(64,))
    serve(manager, *[[numbers.choice((20, 40))] for _ in range(30)])
    assert graphs(manager) == {20, 40, 64}
    serve(manager, *[[numbers.choice((24, 48))] for _ in range(250)])
    assert {24, 48} & graphs(manager)


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
