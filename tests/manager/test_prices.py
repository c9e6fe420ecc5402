"""A plan is what is measured to be cheapest: graphs, splits of them, or eager mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import EncoderFacts, GraphConfig, GraphKey, Reason
from mmgraph.graphs.trace import TraceBackend
from mmgraph.manager import Eager, Plan, Replay
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Graphs
from mmgraph.manager.prices import Measured
from mmgraph.manager.store import GraphStore
from mmgraph.recipes import load_recipe
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
)
from tests.manager.test_plan import SIGNATURE, batch_of, image, key

WIDE = ((64, 1024), (1024, 16))
"""Bounds that take any batch here."""


def wide(tokens: int) -> GraphKey:
    return key(tokens, *WIDE)


def planned(
    sizes: Sequence[int],
    seconds: Mapping[GraphKey, float],
    eager: Mapping[int, float] | None = None,
    budgets: tuple[int, ...] = (64, 256, 1024),
    alike: Mapping[GraphKey, tuple[int, float]] | None = None,
) -> Plan:
    measured = Measured(seconds, {SIGNATURE: eager} if eager else {}, alike or {})
    state = Graphs(seconds.keys(), {}, may_capture=False, measured=measured)
    return Planner(budgets).plan(batch_of(*map(image, sizes)), state)


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ({64: 1, 256: 3}, [(0,), (1,)]),  # two small graphs are cheaper than a large one
        ({64: 1, 256: 1.8}, [(0, 1)]),  # the large one is
        ({64: 1, 256: 2.02}, [(0, 1)]),  # a replay more costs something by itself
        ({256: 3, 1024: 2}, [(0, 1)]),  # even a larger one may be
    ],
)
def test_what_was_measured_decides_how_a_call_is_split(
    milliseconds: dict[int, float], expected: list[tuple[int, ...]]
) -> None:
    seconds = {wide(tokens): 1e-3 * ms for tokens, ms in milliseconds.items()}
    plan = planned([60, 50], seconds)
    assert sorted(replay.items for replay in plan.replays) == expected
    if 1024 in milliseconds:
        assert plan.replays[0].key == wide(1024)


@pytest.mark.parametrize(
    ("eager", "reason"),
    [(0.9, Reason.NOT_FASTER), (0.97, Reason.NOT_FASTER), (0.99, None), (1.5, None), (None, None)],
)
def test_eager_mode_serves_where_it_is_clearly_faster(
    eager: float | None, reason: Reason | None
) -> None:
    plan = planned([100, 50], {wide(1024): 1.0}, {150: eager} if eager else None)
    if reason is None:
        assert plan == Plan((Replay((0, 1), wide(1024)),), ())
    else:
        assert plan == Plan((), (Eager((0, 1), reason),))


def test_what_eager_mode_takes_is_never_guessed_to_be_less_than_measured() -> None:
    seconds = {wide(64): 1.0}
    assert planned([16], seconds, {512: 2.0}).replays  # a small call may take as long
    assert planned([16], seconds, {8: 0.5, 512: 2.0}).eager


@pytest.mark.parametrize(
    ("tokens", "of_call", "is_eager"),
    [
        (1000, 2.0, False),  # as many tokens in other segments say nothing
        (1000, 0.8, True),
        (500, 2.0, False),  # half of it, and what a call costs however small
        (500, 1.7, True),
    ],
)
def test_a_graph_is_compared_with_eager_mode_on_the_call_that_it_was_timed_with(
    tokens: int, of_call: float, is_eager: bool
) -> None:
    eager = {10: 0.1, 1000: 0.9 if of_call > 1 else 1.5}
    plan = planned([tokens], {wide(1024): 1.0}, eager, alike={wide(1024): (1000, of_call)})
    assert bool(plan.eager) is is_eager


def test_two_replays_are_compared_with_one_call_in_eager_mode() -> None:
    seconds = {wide(64): 1.0}
    eager, alike = {10: 0.8, 60: 1.1}, {wide(64): (60, 1.1)}
    assert planned([60], seconds, eager, alike=alike).replays
    plan = planned([60, 60], seconds, eager, alike=alike)  # 1.8 in eager mode, not twice 1.1
    assert plan.eager
    larger = {wide(64): (60, 1.3)}
    assert planned([60, 60], seconds, eager, alike=larger).replays  # 2.2


def test_a_graph_of_exactly_the_tokens_serves_others_that_it_holds() -> None:
    seconds = {wide(256): 3e-3, wide(96): 1e-3}
    for may_capture in (False, True):
        state = Graphs(seconds.keys(), {}, may_capture, measured=Measured(seconds))
        (replay,) = Planner((64, 256)).plan(batch_of(image(80)), state).replays
        assert replay.key == wide(96)
    tight = key(96, (1, 8), (128, 16))  # no table for two images, whatever it costs
    state = Graphs({wide(256), tight}, {}, may_capture=True, measured=Measured({tight: 1e-6}))
    plan = Planner((64, 256)).plan(batch_of(image(40), image(40)), state)
    assert tight not in {replay.key for replay in plan.replays}


class Timed(MeasuredBackend):
    is_timed = True


class Probed(EngineEncoder):
    """Says which calls a fresh graph has to answer."""

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            return [call_of([min(key.token_budget, *key.max_seqlen)])]

        return dataclasses.replace(super().encoder_facts(), probes=probes)


def timed(
    monkeypatch: pytest.MonkeyPatch, replay: Mapping[int, float], eager: float, **config: Any
) -> Any:
    def shortest(_: Any, run: Any) -> float:
        return eager

    monkeypatch.setattr("mmgraph.manager.eager_times.shortest", shortest)
    monkeypatch.setattr(GraphStore, "seconds", lambda _, key: replay[key.token_budget])
    encoder = Probed().requires_grad_(False).eval()
    encoder.load_state_dict(make_encoder().state_dict())
    return make_manager(encoder, Timed(), **config)


def serve(manager: Any, lengths: list[int], times: int) -> None:
    for seed in range(times):
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), manager.model, call)


def test_a_captured_graph_that_is_slower_than_eager_mode_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = timed(monkeypatch, {32: 3.0, 18: 4.0}, eager=2.0)
    serve(manager, [18], 12)
    assert manager.stats().misses == {Reason.NOT_FASTER: 12}
    assert manager.stats().hits == 0


def test_a_graph_of_exactly_its_tokens_may_be_faster_than_eager_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = timed(monkeypatch, {32: 3.0, 18: 1.0}, eager=2.0)
    serve(manager, [18], 12)
    assert manager.stats().misses == {Reason.NOT_FASTER: 7}
    assert manager.stats().hits == 5


def test_up_front_a_far_too_large_budget_leaves_small_calls_to_eager_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = timed(
        monkeypatch, {32: 3.0}, eager=1.0, token_budgets=(32,), capture="upfront", max_items=2
    )
    manager.capture()
    serve(manager, [2], 2)
    assert manager.stats().misses == {Reason.NOT_FASTER: 2}


def test_each_graph_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = timed(monkeypatch, {8: 1.0, 16: 1.5, 32: 3.0}, eager=9.0)
    timings = []
    monkeypatch.setattr(
        GraphStore, "seconds", lambda _, key: timings.append(key) or key.token_budget / 8
    )
    serve(manager, [8], 5)
    serve(manager, [32, 8], 5)
    assert len(timings) == len(set(timings)) == len(manager.stats().graphs)
    (by_tokens,) = manager._store.eager_times.seconds.values()
    assert by_tokens == {4: 9.0, 8: 9.0, 32: 9.0}  # and the smallest call, for once


class ProbedBySegments(EngineEncoder):
    """A fresh graph has to answer a call of as many items as it takes."""

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            (count,) = key.segment_capacity
            return [call_of([key.token_budget // count] * count)]

        return dataclasses.replace(super().encoder_facts(), probes=probes)


@pytest.mark.parametrize(
    ("of_one", "of_two", "misses"), [(2.0, 5.0, 1), (2.0, 2.5, 3), (4.0, 2.5, 2), (4.0, 5.0, 0)]
)
def test_as_many_tokens_in_other_segments_are_timed_for_themselves(
    monkeypatch: pytest.MonkeyPatch, of_one: float, of_two: float, misses: int
) -> None:
    timed_calls = []

    def shortest(_: Any, run: Any) -> float:
        lengths = run.keywords["lengths"].tolist()
        timed_calls.append(lengths)
        return {1: of_one, 2: of_two}[len(lengths)]

    monkeypatch.setattr("mmgraph.manager.eager_times.shortest", shortest)
    monkeypatch.setattr(GraphStore, "seconds", lambda _, key: 3.0)
    encoder = ProbedBySegments().requires_grad_(False).eval()
    encoder.load_state_dict(make_encoder().state_dict())
    manager = make_manager(encoder, Timed(), exact_after=0)
    serve(manager, [32], 1)
    serve(manager, [16, 16], 1)
    assert sum(manager.stats().misses.values()) == misses
    assert [32] in timed_calls
    assert [16, 16] in timed_calls
    times = manager._store.eager_times
    assert {seconds for _, seconds in times.alike.values()} == {of_one, of_two}
    (by_tokens,) = times.seconds.values()
    assert by_tokens[32] == (of_one if of_one > of_two else max(of_one, of_two * (of_two < 3)))
    manager.use_budgets((8, 16))
    assert not times.alike


def test_graphs_are_timed_with_gradients_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are where a model is attached at the top of a script."""
    monkeypatch.setattr(TraceBackend, "is_timed", True)
    model = load_recipe("clip:tiny").build_encoder()
    assert torch.is_grad_enabled()
    config = GraphConfig(capture="upfront", row_budgets=(1, 2))
    with mmgraph.attach(model, config) as handle:
        handle.capture()
        seconds = [graph.replay_seconds for graph in handle.stats().graphs]
    assert len(seconds) == 2
    assert all(seconds)


def test_a_moment_in_which_replays_were_slow_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TraceBackend, "is_timed", True)
    times = iter([5.0, 1.0, 1.0, 2.0, 3.0])  # a replay, eager mode twice, and both again
    monkeypatch.setattr("mmgraph.manager.store.shortest", lambda *_: next(times))
    monkeypatch.setattr("mmgraph.manager.eager_times.shortest", lambda *_: next(times))
    model = load_recipe("clip:tiny").build_encoder()
    with mmgraph.attach(model, GraphConfig(row_budgets=(2,))) as handle, torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, 3, model.config.image_size, model.config.image_size))
        (graph,) = handle.stats().graphs
    assert (graph.replay_seconds, graph.replays) == (pytest.approx(2.0, rel=1e-3), 2)
    assert next(times, None) is None
