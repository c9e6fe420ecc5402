"""What a call holds decides what it costs: one long image, or as many tokens in short ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mmgraph import EncoderFacts, GraphKey, Reason
from mmgraph.manager import Eager, Plan, Replay
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Graphs
from mmgraph.manager.prices import PER_REPLAY, Measured, Prices, saving
from mmgraph.manager.slopes import Slope
from mmgraph.manager.store import GraphStore
from mmgraph.policy import Bin
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)
from tests.manager.test_plan import SIGNATURE, batch_of, image, key

LARGE = key(1024, (16, 128), (1024, 16))


def measured(**more: Any) -> Measured:
    """One graph that takes 10 s for an image of 1,000 tokens, 8 of them for its attention."""
    return Measured(
        {LARGE: 10.0},
        squares={LARGE: 1000**2},
        slopes={SIGNATURE: 8e-6},
        **more,
    )


def test_a_replay_takes_less_for_shorter_segments() -> None:
    known = measured()
    assert known.replay(LARGE) == 10.0
    assert known.replay(LARGE, 1000**2) == 10.0
    assert known.replay(LARGE, 500**2 * 2) == pytest.approx(6.0)
    assert known.replay(LARGE, 0) == pytest.approx(2.0)
    assert known.replay(key(64)) is None
    assert dataclasses.replace(known, squares={}).replay(LARGE, 0) == 10.0
    assert dataclasses.replace(known, slopes={}).replay(LARGE, 0) == 10.0
    steep = dataclasses.replace(known, slopes={SIGNATURE: 1e-3})
    assert steep.replay(LARGE, 0) == pytest.approx(1.0)  # something is always left


def test_segments_of_one_length_are_what_was_timed() -> None:
    exact = GraphKey(1024, (1, 64), (1024, 16), SIGNATURE, uniform=(True, False))
    known = dataclasses.replace(measured(), replays={exact: 10.0}, squares={exact: 1000**2})
    assert known.replay(exact, 0) == 10.0


@pytest.mark.parametrize(
    ("sizes", "is_eager"),
    [([1000], True), ([500, 500], False), ([700, 300], False), ([900, 100], True)],
)
def test_eager_mode_serves_the_contents_that_it_is_faster_for(
    sizes: list[int], is_eager: bool
) -> None:
    """It takes 8 s for one image of 1,000 tokens and 6.5 s for two halves, graphs 10 and 6 s."""
    known = measured(
        eager={SIGNATURE: {10: 0.1}},
        alike={LARGE: (1000, 8.0)},
        eager_slopes={SIGNATURE: 3e-6},
    )
    state = Graphs({LARGE}, {}, may_capture=False, measured=known)
    plan = Planner((1024,)).plan(batch_of(*map(image, sizes)), state)
    everything = tuple(range(len(sizes)))
    if is_eager:
        assert plan == Plan((), (Eager(everything, Reason.NOT_FASTER),))
    else:
        assert plan == Plan((Replay(everything, LARGE),), ())


def test_what_eager_mode_takes_for_a_part_is_a_part_of_what_it_was_timed_with() -> None:
    known = measured(
        eager={SIGNATURE: {10: 1.0}}, alike={LARGE: (1000, 9.0)}, eager_slopes={SIGNATURE: 4e-6}
    )
    prices = Prices(SIGNATURE, (1000, 16), [LARGE], known)
    assert prices.of_eager_instead([LARGE], [1000], [None]) == pytest.approx(9.0)
    assert prices.of_eager_instead([LARGE], [1000], [1000**2]) == pytest.approx(9.0)
    assert prices.of_eager_instead([LARGE], [500], [500 * 1000]) == pytest.approx(0.5 + 4.25)
    assert prices.of_eager_instead([LARGE], [500], [500**2]) == pytest.approx(0.5 + 4.25 - 1)
    assert prices.of_eager_instead([LARGE], [10], [0]) == 1.0  # never below the least
    two = prices.of_eager_instead([LARGE, LARGE], [500, 500], [500**2] * 2)
    assert two == pytest.approx(0.5 + 2 * 3.25)
    steep = Prices(
        SIGNATURE,
        (1000, 16),
        [LARGE],
        dataclasses.replace(known, eager_slopes={SIGNATURE: 1.0}),
    )
    parts = steep.of_eager_instead([LARGE, LARGE], [500, 1000], [500**2, 1000**2])
    assert parts == pytest.approx(0.5 + 8.5)  # no part takes away from another


def test_graphs_of_exactly_some_tokens_are_no_budgets_for_others() -> None:
    """Without leave to capture, what there is are the budgets: but not for any items."""
    small = key(256, (16, 128), (256, 16))
    known = Measured({small: 1.0, LARGE: 4.0, own(600): 1.5}, slopes={SIGNATURE: 0.0})
    state = Graphs(known.replays.keys(), {}, may_capture=False, measured=known)
    planner = Planner((256, 1024), uniform=True)
    assert planner._budgets(batch_of(image(500)), list(known.replays), state) == (256, 1024)
    assert planner._budgets(batch_of(image(600)), list(known.replays), state) == (256, 600, 1024)
    assert planner._budgets(batch_of(), list(known.replays), state) == (256, 1024)
    pair = planner._budgets(batch_of(image(600), image(600)), list(known.replays), state)
    assert pair == (256, 1024)
    (replay,) = planner.plan(batch_of(image(500)), state).replays
    assert replay.key == LARGE
    (replay,) = planner.plan(batch_of(image(600)), state).replays
    assert replay.key == own(600)


def test_how_items_are_divided_does_not_hang_on_what_they_cost_everywhere() -> None:
    """Graphs are timed on segments as long as they allow, large ones on far longer ones."""
    small = key(256, (16, 128), (256, 16))
    known = Measured(
        {small: 1.0, LARGE: 10.0},
        squares={small: 256**2, LARGE: 1024**2},
        slopes={SIGNATURE: 8.8 / 1024**2},
    )
    state = Graphs({small, LARGE}, {}, may_capture=False, measured=known)
    plan = Planner((256, 1024)).plan(batch_of(*[image(200)] * 5), state)
    assert [(r.items, r.key) for r in plan.replays] == [((0, 1, 2, 3, 4), LARGE)]
    unknown = Graphs(
        {small, LARGE}, {}, may_capture=False, measured=dataclasses.replace(known, slopes={})
    )
    assert len(Planner((256, 1024)).plan(batch_of(*[image(200)] * 5), unknown).replays) == 5


def own(tokens: int) -> GraphKey:
    """The key of exactly one image."""
    return Planner((1024,), uniform=True).key_for(batch_of(image(tokens)), Bin((0,), tokens))


@pytest.mark.parametrize(("seconds", "is_apart"), [(3.0, True), (9.0, False)])
def test_an_item_goes_to_a_graph_of_exactly_its_tokens_where_that_is_cheaper(
    seconds: float, is_apart: bool
) -> None:
    """Among the others its attention takes 0.3 s more, and each tokens' share 2 s of 1,024."""
    small = key(256, (16, 128), (256, 16))
    known = Measured(
        {small: 1.0, LARGE: 10.0, own(600): seconds},
        squares={small: 256**2, LARGE: 1000**2},
        slopes={SIGNATURE: 8e-6},
    )
    assert own(600).uniform[0]
    state = Graphs(known.replays.keys(), {}, may_capture=False, measured=known)
    batch = batch_of(image(200), image(600), image(180))
    plan = Planner((256, 1024), uniform=True).plan(batch, state)
    served = sorted((replay.items, replay.key) for replay in plan.replays)
    if is_apart:
        assert served == [((0,), small), ((1,), own(600)), ((2,), small)]
    else:
        assert served == [((0, 1, 2), LARGE)]


def test_all_of_them_go_to_one_of_their_own_where_that_is_cheaper() -> None:
    pair = Planner((1024,), uniform=True).key_for(
        batch_of(image(300), image(300)), Bin((0, 1), 600)
    )
    assert pair.uniform[0]
    for seconds, served in ((5.0, [pair]), (7.0, [own(300), own(300)])):
        known = Measured({LARGE: 10.0, own(300): 3.0, pair: seconds})
        state = Graphs(known.replays.keys(), {}, may_capture=True, measured=known)
        plan = Planner((1024,), uniform=True).plan(batch_of(image(300), image(300)), state)
        assert [replay.key for replay in plan.replays] == served


@pytest.mark.parametrize("timed_", [True, False])
def test_an_item_above_the_graphs_for_any_items_has_its_own(timed_: bool) -> None:
    small = key(256, (16, 128), (256, 16))
    known = Measured({small: 1.0, own(600): 2.0}) if timed_ else Measured()
    state = Graphs({small, own(600)}, {}, may_capture=False, measured=known)
    plan = Planner((256, 1024), uniform=True).plan(batch_of(image(600), image(100)), state)
    assert {replay.key: replay.items for replay in plan.replays} == {own(600): (0,), small: (1,)}
    assert not plan.eager


def test_that_is_so_by_tokens_where_nothing_is_timed() -> None:
    small = key(256, (16, 128), (256, 16))
    larger = key(2048, (16, 128), (2048, 16))
    state = Graphs({small, larger, own(600)}, {}, may_capture=False)
    batch = batch_of(image(600), image(600), image(240))
    plan = Planner((256, 2048), uniform=True).plan(batch, state)
    assert {replay.key: replay.items for replay in plan.replays}[small] == (2,)
    assert sorted(r.items for r in plan.replays if r.key == own(600)) == [(0,), (1,)]


def test_what_a_graph_saves_is_held_against_others_on_the_same_call() -> None:
    known = dataclasses.replace(measured(eager={SIGNATURE: {10: 99.0}}))
    known = dataclasses.replace(known, replays={**known.replays, own(600): 2.0})
    others = 10.0 - 8e-6 * (1000**2 - 600**2)
    assert saving(own(600), known) == pytest.approx(others - 2.0)


def test_a_slope_is_that_of_large_calls() -> None:
    slope = Slope()
    assert slope.value == 0.0
    assert not slope.hears(0)
    assert slope.hears(1)
    slope.add(2e-3, 1_000_000)
    assert slope.value == pytest.approx(2e-9)
    assert slope.hears(600_000)
    assert not slope.hears(400_000)
    assert slope.hears(-600_000)
    slope.add(-1e-4, 1_000)  # noise
    assert slope.value == pytest.approx(2e-9, rel=1e-3)
    slope.add(-8.0, 1_000_000)
    assert slope.value == 0.0


class Timed(MeasuredBackend):
    is_timed = True


class TwoProbes(EngineEncoder):
    """A fresh graph answers one item that fills it, and two halves. Items have one length each."""

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            tokens = key.token_budget
            calls = [call_of([min(tokens, key.max_seqlen[0])])]
            if key.segment_capacity[0] > 1:
                calls.append(call_of([tokens // 2] * 2))
            return calls

        return dataclasses.replace(super().encoder_facts(), probes=probes, uniform_graphs=True)

    def version(self) -> int:
        return 0

    def hold_memory(self) -> TwoProbes:
        """So that calls whose graphs are there take the short way (``Plans.ready``)."""
        return self

    def is_there(self) -> bool:
        return True


def seconds_of(lengths: Sequence[int], budget: int, slope: float) -> float:
    return 1e-3 * (1 + budget) + slope * sum(n * n for n in lengths)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes managers on which a replay takes a millisecond a token and `SLOPE` a square."""

    def seconds(store: GraphStore, key: GraphKey, call: Any) -> float:
        lengths = call["lengths"].tolist()
        slope = UNIFORM_SLOPE if key.uniform else SLOPE
        return seconds_of(lengths, key.token_budget, slope)

    def eager(_: Any, run: Any) -> float:
        lengths = run.keywords["lengths"].tolist()
        return EAGER * seconds_of(lengths, sum(lengths), SLOPE)

    monkeypatch.setattr(GraphStore, "_seconds", seconds)
    monkeypatch.setattr("mmgraph.manager.eager_times.shortest", eager)

    def make(encoder: Any = None, **config: Any) -> Any:
        encoder = (encoder or TwoProbes()).requires_grad_(False).eval()
        encoder.load_state_dict(make_encoder().state_dict())
        return make_manager(encoder, Timed(), **config)

    return make


SLOPE, UNIFORM_SLOPE, EAGER = 1e-4, 0.5e-4, 2.0


def serve(manager: Any, *calls: list[int]) -> None:
    for seed, lengths in enumerate(calls):
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), manager.model, call)


def test_what_attention_takes_is_measured_when_graphs_are_captured(timed: Any) -> None:
    manager = timed(exact_after=0)
    serve(manager, [10, 20])
    known = manager._store.measured
    (graph,) = known.replays
    assert known.squares == {graph: 32**2}
    assert list(known.slopes.values()) == pytest.approx([SLOPE])
    assert list(known.eager_slopes.values()) == pytest.approx([EAGER * SLOPE])
    assert known.replay(graph, 10**2 + 20**2) == pytest.approx(seconds_of([10, 20], 32, SLOPE))
    manager.clear()
    assert not manager._store.measured.squares
    assert not manager._store.measured.slopes
    assert not manager._store.measured.eager_slopes


COMPANY = [[2], [4], [6], [10], [12], [14], [2, 2], [2, 4], [4, 4], [6, 2], [6, 4], [10, 2]]


class HalfProbes(TwoProbes):
    """The second call is half as large."""

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            return [call_of([key.max_seqlen[0]]), call_of([key.max_seqlen[0] // 2])]

        return dataclasses.replace(super().encoder_facts(), probes=probes)


def test_eager_mode_is_compared_on_as_many_tokens_only(timed: Any) -> None:
    manager = timed(HalfProbes(), exact_after=0)
    serve(manager, [30])
    known = manager._store.measured
    assert list(known.slopes.values()) == pytest.approx([SLOPE])
    assert list(known.eager_slopes.values()) == [0.0]


def in_company(first: int, last: int) -> list[list[int]]:
    """Calls of an item of 18 tokens, each time with others."""
    return [[18, *others] for others in COMPANY[first:last]]


def keys_of(manager: Any) -> set[tuple[int, bool]]:
    return {(g.key.token_budget, bool(g.key.uniform)) for g in manager.stats().graphs}


def test_an_item_that_keeps_coming_in_new_company_gets_a_graph(timed: Any) -> None:
    manager = timed()
    serve(manager, *in_company(0, 7))
    assert (18, True) not in keys_of(manager)
    serve(manager, *in_company(7, 9))
    assert (18, True) in keys_of(manager)
    before = manager.stats()
    serve(manager, [18, 18], [18])
    after = manager.stats()
    assert after.misses == {}
    replays = {g.key: g.replays for g in before.graphs}
    (exact,) = [g for g in after.graphs if g.key.token_budget == 18]
    assert exact.replays == replays[exact.key] + 3
    assert (18 + 8, True) not in keys_of(manager)


def test_the_same_company_counts_once(timed: Any) -> None:
    manager = timed()
    serve(manager, *[[18, 6]] * 7)
    assert (18, True) not in keys_of(manager)
    serve(manager, [18, 6])  # all of it
    assert 24 in {tokens for tokens, _ in keys_of(manager)}
    assert (18, True) not in keys_of(manager)


def test_each_new_company_counts_once_whichever_way_it_is_served(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = timed(exact_after=3)
    with manager.capturing():
        serve(manager, [20, 10], [20, 4])  # from now on there is a graph for any pair
    slow, plans = [], manager._plans
    plan = plans.plan
    monkeypatch.setattr(plans, "plan", lambda batch: slow.append(batch) or plan(batch))
    serve(manager, [18, 10], [18, 12])
    assert not slow
    assert (18, True) not in keys_of(manager)
    serve(manager, [18, 12], [18, 10])  # known by now
    assert not slow
    serve(manager, [18, 14])
    assert len(slow) == 1
    assert (18, True) in keys_of(manager)


def test_an_item_that_fills_a_budget_is_wished_for_once(timed: Any) -> None:
    manager = timed(min_hits=2)
    serve(manager, [32, 4])
    assert not keys_of(manager)
    serve(manager, [32, 6])
    assert (32, True) in keys_of(manager)


def test_without_memory_calls_go_on_as_they_were(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = timed(exact_after=0, token_budgets=(32,))
    serve(manager, [18, 2])
    most = manager._store.num_bytes
    manager = timed(exact_after=3, token_budgets=(32,), max_graph_bytes=most)
    serve(manager, *[call for call in in_company(0, 6) for _ in range(3)])
    plans = manager._plans
    monkeypatch.setattr(plans, "plan", lambda _: pytest.fail("planned again"))
    serve(manager, *in_company(0, 6), *in_company(0, 6), [18, 8], [16, 8])
    assert keys_of(manager) == {(32, False)}
    assert manager.stats().evictions == 0


def test_none_takes_the_room_of_another_graph(timed: Any) -> None:
    manager = timed(exact_after=4, token_budgets=(8, 32), max_graphs=2)
    serve(manager, [4], [30], *in_company(0, 12))
    assert keys_of(manager) == {(8, False), (32, False)}
    assert manager.stats().evictions == 0


def test_of_two_that_are_due_at_once_the_first_takes_the_room(timed: Any) -> None:
    manager = timed(exact_after=2, token_budgets=(32,), max_graphs=4)
    serve(manager, [18, 2], [18, 4])
    assert keys_of(manager) == {(32, False), (18, True)}
    serve(manager, [20, 22], [22, 20])
    assert len(keys_of(manager) & {(20, True), (22, True)}) == 1


def test_an_item_takes_the_place_of_one_that_comes_no_more(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmgraph.manager.demand._SIGMA", 0.0)
    monkeypatch.setattr("mmgraph.manager.tight._STEADY", 1)
    manager = timed(exact_after=3, token_budgets=(32,), max_graphs=2)
    serve(manager, *in_company(0, 3), *[[20, other] for other in (2, 4, 6)])
    assert keys_of(manager) == {(32, False), (18, True)}  # it came not long ago
    assert manager.stats().evictions == 0
    serve(manager, *[[20, other] for other in (8, 10, 12)])
    assert keys_of(manager) == {(32, False), (20, True)}
    assert manager.stats().evictions == 1
    assert manager.stats().misses == {}


def test_two_items_of_a_call_leave_each_other_alone(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmgraph.manager.demand._SIGMA", -9.0)  # whatever is asked for is more
    manager = timed(exact_after=2, token_budgets=(64,), max_graphs=2)
    serve(manager, [18, 24], [24, 18], [18, 24, 2], [24, 18, 2])
    assert manager._store.backend.captured == [64, 24]
    assert manager.stats().evictions == 0


def test_items_of_no_tokens_have_none() -> None:
    planner = Planner((64, 256), uniform=True)
    assert planner.own_key(image(0), SIGNATURE) is None
    assert planner.own_key(image(72), SIGNATURE) is not None
    assert planner.own_key(image(300), SIGNATURE) is None
    assert planner.own_key(image(80, frames=2), SIGNATURE) is not None
    other = dataclasses.replace(image(80), num_segments=(2, 5), max_seqlen=(50, 16))
    assert planner.own_key(other, SIGNATURE) is None  # 50 and 30
    planner.budgets = (64,)
    assert planner.own_key(image(72), SIGNATURE) is None
    assert Planner((64, 256)).own_key(image(72), SIGNATURE) is None


@pytest.mark.parametrize(
    "config",
    [
        {"exact_after": 0},
        {"max_graphs": 1},
        {"capture": "upfront"},
        {"token_budgets": (8, 16)},  # no budget holds it
    ],
)
def test_otherwise_it_has_none(timed: Any, config: dict[str, Any]) -> None:
    manager = timed(**config)
    if manager.config.capture == "upfront":
        manager.capture()
    serve(manager, *in_company(0, 12))
    assert (18, True) not in keys_of(manager)


def test_the_first_time_is_early_enough_if_that_is_wanted(timed: Any) -> None:
    manager = timed(exact_after=1)
    serve(manager, [18, 8])
    assert (18, True) in keys_of(manager)


def test_half_of_the_graphs_are_left_to_budgets(timed: Any) -> None:
    manager = timed(max_graphs=10, exact_after=2)
    serve(manager, *[[n, 2 + 2 * k] for n in (10, 12, 14, 18, 20, 22) for k in range(5)])
    exact = {tokens for tokens, _ in keys_of(manager)} - {8, 16, 32}
    assert len(exact) == 5
    assert exact < {2, 4, 6, 10, 12, 14, 18, 20, 22}


def test_one_that_saves_next_to_nothing_is_dropped(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.UNIFORM_SLOPE", 1e-3)
    manager = timed()
    serve(manager, *in_company(0, 12))
    assert (18, True) not in keys_of(manager)
    assert list(manager._store.failed.values()).count(Reason.NOT_FASTER) >= 1
    attempts = manager._store.backend.captured.count(18)
    serve(manager, *in_company(0, 12))
    assert manager._store.backend.captured.count(18) == attempts == 1


def test_a_graph_of_all_is_held_against_others_on_the_same_call(timed: Any) -> None:
    """32 tokens, of which two images take less than the one that it was timed with."""
    manager = timed(exact_after=0)
    plan_of = manager._plans
    serve(manager, [18, 10])
    (replay,) = plan_of.ready(manager.model.item_specs(call_of([18, 10]))).replays
    assert replay.key.token_budget == 32
    batch = manager.model.item_specs(call_of([18, 10]))
    assert plan_of._tight._seconds(replay, batch) == pytest.approx(seconds_of([18, 10], 32, SLOPE))


def test_costs_of_budgets_and_of_their_graphs_are_of_one_kind() -> None:
    prices = Prices(SIGNATURE, (10, 16), [LARGE], measured())
    assert prices.of_graph(key(64), 100) is None
    assert prices.of_graph(LARGE, 100**2) == pytest.approx(PER_REPLAY + 2.0)
    assert prices.of_budgets([1024]) == pytest.approx([PER_REPLAY + 2.0])
    assert prices.of_replays([LARGE], [100**2]) == pytest.approx(PER_REPLAY + 2.0 + 8e-6 * 100**2)
