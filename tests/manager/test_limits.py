"""Memory is bounded; what is asked for rarely isn't captured; the least useful graph gives way."""

from __future__ import annotations

from typing import Any

import pytest

from mmgraph import (
    ConfigError,
    EncoderBatch,
    EncoderCudaGraphManager,
    EncoderItemSpec,
    GraphConfig,
    GraphKey,
    Reason,
)
from mmgraph.manager.demand import Demand
from mmgraph.manager.prices import Measured, saving
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)

KIB = 1024


def serve(manager: EncoderCudaGraphManager, *calls: list[int]) -> None:
    """Each time right, and never beyond the bound."""
    encoder: Any = manager.model
    for seed, lengths in enumerate(calls):
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), encoder, call)
        limit = manager.config.max_graph_bytes
        assert limit is None or manager._store.num_bytes <= limit
        assert len(manager.stats().graphs) <= manager.config.max_graphs


def budgets(manager: EncoderCudaGraphManager) -> set[int]:
    return {graph.key.token_budget for graph in manager.stats().graphs}


def buffers() -> int:
    """Bytes of the static buffers."""
    manager = make_manager()
    serve(manager, [8])
    return sum(arena.num_bytes for arena in manager._store.arenas.values())


def test_a_graph_comes_when_it_was_asked_for_often_enough() -> None:
    manager = make_manager(min_hits=3)
    serve(manager, [8], [8])
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 2}
    assert not manager.stats().graphs
    serve(manager, [8], [6])  # the third time, by whatever batch
    assert manager.stats().hits == 2
    serve(manager, [32])
    with manager.capturing():
        serve(manager, [32])  # here at once
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 3}
    assert budgets(manager) == {8, 32}


def test_up_front_everything_is_captured_whatever_was_asked_for() -> None:
    manager = make_manager(min_hits=9, capture="upfront")
    manager.capture()
    serve(manager, [8])
    assert manager.stats().hits == 1


def test_the_least_useful_graph_gives_way_to_one_that_is_clearly_more_useful() -> None:
    manager = make_manager(max_graphs=2)
    serve(manager, [8], [16], *[[16]] * 5)
    replays = {g.key.token_budget: g.replays for g in manager.stats().graphs}
    assert replays == {8: 1, 16: 6}
    assert manager.stats().evictions == 0
    serve(manager, *[[30]] * 4)
    assert budgets(manager) == {16, 32}
    assert manager.stats().evictions == 1
    assert manager.stats().misses == {Reason.GRAPH_LIMIT: 3}
    serve(manager, *[[30]] * 3)
    assert manager.stats().misses == {Reason.GRAPH_LIMIT: 3}


@pytest.mark.parametrize(
    "calls",
    [
        ([8], [4], [16], [30], [2, 2, 4], [2] * 4, [8, 8], [2] * 16),
        ([2] * 16, [2, 2, 4], [8, 8], [16], [4], [30], [8]),
    ],
)
def test_where_there_is_room_for_few_graphs_each_takes_all_that_its_budget_holds(
    calls: tuple[list[int], ...],
) -> None:
    manager = make_manager(max_graphs=3, max_items=16, exact_after=0)
    serve(manager, *calls, *calls)
    stats = manager.stats()
    assert (stats.misses, stats.replays) == ({}, 2 * len(calls))
    assert [(g.key.token_budget, g.key.max_seqlen) for g in stats.graphs] == [
        (tokens, (tokens,)) for tokens in [g.key.token_budget for g in stats.graphs]
    ]
    assert budgets(manager) == {8, 16, 32}


def test_room_is_kept_for_a_graph_a_budget_that_takes_all() -> None:
    """The first of four may be for few, the others are for whatever comes."""
    manager = make_manager(max_graphs=4, max_items=16, exact_after=0)
    serve(manager, [8], [30], [16], [2, 2, 4], [2] * 8, [2] * 16, [8], [30], [30])
    stats = manager.stats()
    assert (stats.misses, stats.replays) == ({}, 9)
    capacities = {8: [], 16: [], 32: []}
    for graph in stats.graphs:
        capacities[graph.key.token_budget] += graph.key.segment_capacity
    assert capacities == {8: [1, 4], 16: [8], 32: [16]}


def test_whether_room_is_scarce_is_asked_again_once_there_is_another_graph() -> None:
    manager = make_manager(max_graphs=4, max_items=2)
    serve(manager, [6, 2])  # as general as a graph of 8 tokens gets: room for one more than needed
    serve(manager, [2, 2])  # which goes to this one
    serve(manager, [16])
    keys = [graph.key for graph in manager.stats().graphs]
    assert [(key.token_budget, key.segment_capacity) for key in keys] == [
        (8, (2,)),
        (8, (2,)),
        (16, (2,)),
    ]


def test_a_size_that_keeps_coming_gets_its_graph_where_room_is_scarce() -> None:
    manager = make_manager(max_graphs=3, max_items=16, exact_after=2)
    serve(manager, *[[10]] * 4)
    assert budgets(manager) == {10, 16}
    serve(manager, [30], [8], [2] * 4, [4, 4], [8, 8], [2] * 16)  # all others are still served
    assert manager.stats().misses == {}


@pytest.mark.parametrize("broken", ["raises", "empty", "kinds"])
def test_an_encoder_with_unusable_examples_serves_all_the_same(broken: str) -> None:
    class Encoder(EngineEncoder):
        def _examples(self, budget: int, max_items: int) -> Any:
            if broken == "raises":
                raise NotImplementedError
            if broken == "empty":
                return []
            items = (EncoderItemSpec(budget, (1, 1), (budget, budget)),)
            return [EncoderBatch(items, "another")]

    encoder = Encoder().requires_grad_(False).eval()
    encoder.load_state_dict(make_encoder().state_dict())
    manager = make_manager(encoder, max_graphs=3)
    serve(manager, [8], [16], [30], [8, 8])
    assert manager.stats().misses == {}


def test_what_a_graph_saves_is_worked_out_once_for_the_graphs_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that waits for a graph asks at each turn."""
    asked = []
    monkeypatch.setattr(
        "mmgraph.manager.prices.saving", lambda key, measured, gone=(): asked.append(key) or 1e-3
    )
    manager = make_manager(max_graphs=2, max_items=1)
    serve(manager, [8], [8], [16], [16], *[[30]] * 3)
    assert not asked  # nothing goes before the fourth time
    manager = make_manager(max_graphs=2, max_items=1)
    serve(manager, *[[8], [16]] * 9, *[[30]] * 9)
    assert len(asked) == len(set(asked)) == 3


def test_sizes_that_take_turns_free_no_graphs() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend, max_graphs=2)
    serve(manager, *[[8], [16], [30]] * 12)
    assert len(backend.captured) == 2


def test_what_had_to_go_must_be_asked_for_more_often() -> None:
    demand, key = Demand(), GraphKey(8)
    demand.add(key)
    assert demand.wanted(key, 1)
    demand.evicted([key])
    demand.add(key)
    assert not demand.wanted(key, 1)
    demand.add(key)
    assert demand.wanted(key, 1)


def test_old_uses_count_less_and_are_forgotten() -> None:
    demand, old, new = Demand(), GraphKey(8), GraphKey(16)
    for _ in range(8):
        demand.add(old)
    for _ in range(3000):
        demand.call()
    assert demand.of(old) == pytest.approx(1.0)
    for _ in range(4):
        demand.add(new)
    assert demand.victim(new, [old], lambda _: 1.0) == old
    assert demand.victim(new, [old], lambda key: 4.0 if key == old else 1.0) is None
    assert demand.victim(new, [], lambda _: 1.0) is None
    for tokens in range(5000):
        demand.add(GraphKey(100 + tokens))
    assert len(demand._scores) <= 4096


def test_a_use_is_worth_what_it_saves() -> None:
    keys = [GraphKey(tokens) for tokens in (8, 32)]
    measured = Measured({keys[0]: 1e-3, keys[1]: 3e-3}, {None: {8: 5e-3, 32: 6e-3}})
    assert saving(keys[1], measured) == pytest.approx(6e-3 - 3e-3 - 30e-6)
    assert saving(keys[0], measured) == pytest.approx(3e-3 - 1e-3)  # the other one takes it too
    assert saving(keys[0], measured, gone=[keys[1]]) == pytest.approx(5e-3 - 1e-3 - 30e-6)
    assert saving(GraphKey(20), measured) == pytest.approx(3e-3 - 2e-3)
    assert saving(GraphKey(20), measured, gone=keys) == pytest.approx(5.5e-3 - 2e-3 - 30e-6)
    slow = Measured(measured.replays, {None: {8: 1e-3}}, {keys[0]: (8, 4e-3)})
    assert saving(keys[0], slow, gone=keys) == pytest.approx(4e-3 - 1e-3 - 30e-6)
    assert saving(GraphKey(8, signature="another"), measured) == 1e-3


@pytest.mark.parametrize("graphs", [0, 1, 2])
def test_graphs_never_take_more_than_they_may(graphs: int) -> None:
    manager = make_manager(backend=MeasuredBackend(), max_graph_bytes=buffers() + graphs * KIB + 9)
    serve(manager, [8], [16], [30], [8], [16], [30])
    assert len(manager.stats().graphs) == graphs
    assert manager.stats().misses.get(Reason.MEMORY_LIMIT, 0) == 2 * (3 - graphs)
    serve(manager, *[[30]] * 12)
    assert budgets(manager) >= ({32} if graphs else set())


def test_what_has_no_memory_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(backend=MeasuredBackend(), max_graph_bytes=buffers() + KIB + 9)
    serve(manager, [8], [16], [30], [8], [16], [30])
    warnings = [m for m in caplog.messages if "max_graph_bytes" in m]
    assert len(warnings) == 1
    assert warnings[0].startswith("engine: no graph for 16 tokens")


def test_up_front_smaller_budgets_are_tried() -> None:
    class Sized(MeasuredBackend):
        def capture(self, run: Any, buffers: Any, like: Any = None) -> Any:
            graph = super().capture(run, buffers, like)
            graph.num_bytes = 100 * buffers["patches"].shape[0]
            return graph

    manager = make_manager(
        backend=Sized(), max_graph_bytes=buffers() + 2500, capture="upfront", max_items=1
    )
    manager.capture()
    assert budgets(manager) == {8, 16}
    serve(manager, [30])
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 1}


def test_memory_that_the_pool_keeps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a pool gives memory back with its last graph, so all go where one is too large."""
    backend = MeasuredBackend()
    backend.name = "cuda"
    manager = make_manager(backend=backend, max_graph_bytes=buffers() + KIB + 9)
    serve(manager, [8], [8], [30])
    assert budgets(manager) == set()  # the attempt had grown the pool
    assert manager.stats().evictions == 1
    serve(manager, [8], [30])
    assert budgets(manager) == {8}


@pytest.mark.parametrize("name", ["max_graph_bytes", "min_hits"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_settings_must_be_positive(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer"):
        GraphConfig(**{name: value})
