"""Traces follow the models' own rules, and the comparison on them runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mmgraph import ConfigError, EncoderStats
from mmgraph.stats import GraphRecord
from mmgraph.types import GraphKey
from scripts import bench_traces
from scripts.bench_traces import WAYS, Bench, main
from scripts.traces import MODELS, TRACES, make_trace
from scripts.traces_records import Kind, Result, in_turn, tokens_of, total_of, weights_of
from scripts.traces_timing import Lane, Race
from scripts.usual_planner import UsualPlanner
from tests.manager.test_plan import batch_of, graphs, image


@settings(deadline=None)
@given(st.integers(30, 4000), st.integers(30, 4000), st.sampled_from(sorted(MODELS)))
@example(685, 2192, "qwen2_5_vl")  # the last bit of a square root decides
def test_images_are_sized_as_transformers_does_it(height: int, width: int, model: str) -> None:
    rules = MODELS[model]
    side = rules.patch * rules.merge
    expected = smart_resize(height, width, side, rules.min_pixels, rules.max_pixels)
    _, rows, columns = rules.grid((1, height, width))
    assert (rows * rules.patch, columns * rules.patch) == expected


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_has_500_calls_and_is_the_same_each_time(name: str, model: str) -> None:
    trace = make_trace(name, model)
    assert len(trace.calls) == 500
    assert trace == make_trace(name, model)
    assert (trace == make_trace(name, model, seed=1)) is (name == "camera")
    rules = MODELS[model]
    for call in trace.calls:
        assert call
        for t, h, w in call:
            assert t >= 1
            assert h % rules.merge == w % rules.merge == 0
            pixels = t * h * w * rules.patch**2
            assert 0 < pixels <= max(rules.max_pixels, rules.max_clip_pixels)
    frames = {t for call in trace.calls for t, _, _ in call}
    assert (max(frames) > 1) is (name == "chat")


def test_clips_are_bounded_as_a_whole() -> None:
    rules = MODELS["qwen3_vl"]
    t, h, w = rules.grid((32, 720, 1280))
    assert t == 16
    assert t * 2 * h * w * rules.patch**2 <= rules.max_clip_pixels
    assert rules.grid((5, 64, 64))[0] == 3


def test_the_usual_packing_has_one_graph_a_budget() -> None:
    planner = UsualPlanner((64, 256), (0.5, 1.0), (None, 16))
    plan = planner.plan(batch_of(image(60), image(200), image(10), image(300)), graphs())
    assert [(replay.items, replay.key.token_budget) for replay in plan.replays] == [
        ((0, 2), 256),
        ((1,), 256),
    ]
    assert {replay.key.max_seqlen for replay in plan.replays} == {(256, 16)}
    assert plan.eager[0].items == (3,)


def test_the_comparison_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    main(
        "--model qwen2_5_vl:tiny --calls 4 --kinds 1 --repeats 1 --shrink 24 --seconds 5 "
        f"--traces camera chat --max-graphs 1 --device cpu --out {tmp_path}".split()
    )
    report = json.loads((tmp_path / "traces-qwen2_5_vl-tiny.json").read_text(encoding="utf-8"))
    assert list(report["traces"]) == ["camera", "chat"]
    for result in report["traces"].values():
        assert result["timed_kinds"] == 1
        totals = result["total_ms"]
        assert list(totals) == [*WAYS, "best of each call"]
        assert totals["best of each call"] <= min(totals[way] for way in WAYS)
        assert all(result["ways"][way]["graphs"] > 0 for way in WAYS if way != "eager")
        assert result["ways"]["mmgraph"]["graphs"] == 1
        assert result["ways"]["mmgraph, fitted"]["padding"] == 0  # a budget for each of 4 calls
        assert result["ways"]["eager"]["worst"] == 1
        assert all(way["worst"] > 0 for way in result["ways"].values())
        assert all(0 <= way["padding"] < 1 for way in result["ways"].values())
        (kind,) = result["by_kind"]
        for name, ms in kind["ms"].items():
            assert kind["stands_for"] * ms == pytest.approx(totals[name], rel=1e-2, abs=1e-2)
        plain, best = totals["usual, our kernels"], totals["best of each call"]
        ours = [totals["mmgraph"], totals["mmgraph, fitted"]]
        assert list(result["ratios"].values()) == pytest.approx(
            [ours[0] / best, plain / ours[0], ours[1] / best, plain / ours[1]], rel=1e-2
        )
    both = report["all"]
    for way, ms in both["total_ms"].items():
        assert ms == pytest.approx(sum(r["total_ms"][way] for r in report["traces"].values()))
    assert both["ratios"]["mmgraph / best of each call"] >= 1
    text = (tmp_path / "traces-qwen2_5_vl-tiny.md").read_text(encoding="utf-8")
    assert " | mmgraph / best of each call | usual, our kernels / mmgraph | " in text
    assert "| camera | 4 of 4 (1 kinds) | 4 |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| all |")]
    assert line.endswith("| {:.3f} | {:.3f} | {:.3f} | {:.3f} |".format(*both["ratios"].values()))
    assert "Command: `python -m scripts.bench_traces --model qwen2_5_vl:tiny" in text
    assert "--shrink 24 --max-graphs 1`" in text


class Clock:
    """Stands still unless something takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bench_for(clock: Clock, **settings: object) -> Bench:
    cpu = torch.device("cpu")
    return Bench("qwen2_5_vl:tiny", cpu, clock=clock, **{"repeats": 2, **settings})


KINDS = (((1, 4, 4),), ((1, 4, 8),), ((1, 8, 8),), ((1, 8, 12),))
EAGER, OURS, OTHER = "eager", "ours", "other"


class Tower:
    """Takes some seconds a call, and serves it from a graph of 100 tokens; some capture one."""

    def __init__(
        self, clock: Clock, calls: list[tuple[str, int]], name: str, seconds: float
    ) -> None:
        self.clock, self.calls, self.name, self.seconds = clock, calls, name, seconds
        self.captures: Collection[int] = ()
        self.number = self.tokens = 0
        self.graphs: list[GraphRecord] = []

    def __call__(self, tokens: int) -> None:
        self.clock.now += self.seconds
        if self.number in self.captures:
            self.graphs.append(GraphRecord(GraphKey(self.number), 0, 0, 0.0))
        self.number += 1
        self.tokens += tokens
        self.calls.append((self.name, tokens))

    def stats(self) -> EncoderStats:
        padding = 100 * self.number - self.tokens
        return EncoderStats(tokens=self.tokens, padding=padding, graphs=tuple(self.graphs))


class Track:
    """A race of eager mode, mmgraph and another way, which take 2, 1 and 3 seconds a call."""

    def __init__(self, clock: Clock, repeats: int = 2) -> None:
        self.calls: list[tuple[str, int]] = []
        seconds = {EAGER: 2.0, OURS: 1.0, OTHER: 3.0}
        self.towers = {name: Tower(clock, self.calls, name, s) for name, s in seconds.items()}
        self.lanes = {
            name: Lane(
                tower,
                lambda kind: {"tokens": tokens_of(kind)},
                stats=EncoderStats if name == EAGER else tower.stats,
                is_ours=name == OURS,
            )
            for name, tower in self.towers.items()
        }
        eager, *others = self.lanes.values()
        self.pauses: list[float] = []
        self.race = Race(
            eager,
            others,
            repeats=repeats,
            wait=lambda: None,
            clock=clock,
            sleep=self.pauses.append,
        )

    def calls_of(self, name: str) -> list[int]:
        return [tokens for other, tokens in self.calls if other == name]


@pytest.fixture
def track(clock: Clock) -> Track:
    return Track(clock)


def test_frequent_kinds_are_settled_and_then_timed_in_turn(clock: Clock, track: Track) -> None:
    assert track.race.run(KINDS[:1], Counter({KINDS[0]: 3}), clock.now + 99) == [KINDS[0]]
    names = [name for name, _ in track.calls]
    assert names[:3] == [EAGER, OURS, OTHER]
    for turn in (names[3:6], names[6:]):
        assert sorted(turn) == sorted([EAGER, OURS, OTHER])
    assert track.pauses == [0.0, *[0.04] * 8]
    results = {name: lane.result for name, lane in track.lanes.items()}
    assert [result.seconds for result in results.values()] == [
        {KINDS[0]: seconds} for seconds in (2, 1, 3)
    ]
    assert [result.settling_s for result in results.values()] == [2, 1, 3]
    assert results[OURS].tokens == {KINDS[0]: (100, 84)}
    assert results[EAGER].tokens == {KINDS[0]: (0, 0)}


def test_ways_come_in_another_order_each_time(clock: Clock) -> None:
    track = Track(clock, repeats=20)
    track.race.run(KINDS[:1], Counter({KINDS[0]: 3}), clock.now + 999)
    names = [name for name, _ in track.calls][3:]
    turns = {tuple(names[i : i + 3]) for i in range(0, len(names), 3)}
    assert len(turns) == 6


def test_rare_kinds_are_timed_once_and_again_after_a_capture(clock: Clock, track: Track) -> None:
    track.towers[OURS].captures = [0, 3, 4, 5]
    counts = Counter({KINDS[0]: 2, KINDS[1]: 1, KINDS[2]: 1})
    track.race.run(KINDS[:3], counts, clock.now + 99)
    # A capture, then without one; without one; captures in all three.
    assert track.calls_of(OURS) == [16] * 2 + [32] + [64] * 3
    assert track.calls_of(EAGER) == [16, 32, 64]
    assert track.lanes[OURS].result.settling_s == 3


def test_time_ends_after_a_kind_and_leaves_one_at_least(clock: Clock, track: Track) -> None:
    counts = Counter(KINDS)
    assert track.race.run(KINDS, counts, clock.now) == [KINDS[0]]
    assert track.race.run(KINDS, counts, clock.now + 7) == list(KINDS[:2])  # six seconds each


@pytest.mark.parametrize(("name", "more"), [(OURS, 4), (OTHER, 0)])
@pytest.mark.parametrize("seconds", [1.7, 1.9])
def test_what_takes_as_long_as_eager_mode_is_timed_some_more(
    clock: Clock, track: Track, name: str, more: int, seconds: float
) -> None:
    track.towers[name].seconds = seconds
    track.race.run(KINDS[:1], Counter(KINDS), clock.now + 99)
    more = more if seconds > 1.8 else 0
    assert [len(track.calls_of(each)) for each in track.lanes] == [1 + more] * 3


def test_each_trace_has_an_equal_share_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_for(clock, seconds=80.0, traces=["camera", "photos", "chat"])
    shares = []

    def trace(_: Bench, calls: list[Kind], end: float) -> dict[str, Any]:
        shares.append(end - clock.now)
        clock.now += 30
        return {"calls": len(calls)}

    monkeypatch.setattr(Bench, "_trace", trace)
    clock.now += 7  # what lies before isn't counted
    assert [result for _, result in bench.run(20)] == [{"calls": 20}] * 3
    assert shares == pytest.approx([80 / 3, 50 / 2, 20])


def test_what_is_timed_is_weighed_and_held_against_eager_mode() -> None:
    small, large = KINDS[:2]
    eager = Result({small: 1.0, large: 2.0})
    ours = Result({small: 0.5, large: 2.2}, {small: (32, 0), large: (64, 32)})
    ours.judge({small: 6, large: 2}, eager)
    assert ours.padding == 64 / (6 * 32 + 2 * 64)
    assert ours.worst == 1.1
    assert total_of(ours.seconds, {small: 6, large: 2}) == 7.4
    ours.tokens = {small: (0, 0)}  # all in eager mode
    ours.judge({small: 6}, eager)
    assert (ours.padding, ours.worst) == (0, 0.5)


def test_frequent_and_rare_kinds_are_timed_in_turn() -> None:
    often, less, once, twice = KINDS
    counts = Counter({once: 1, often: 9, less: 3, twice: 2})
    order = in_turn(counts)
    assert order[::2] == [often, less]
    assert set(order[1::2]) == {once, twice}
    assert order == in_turn(counts)


def test_what_is_timed_stands_for_its_own_sort() -> None:
    often, less, once, twice = KINDS
    counts = Counter({once: 1, often: 9, less: 3, twice: 2})
    assert weights_of(KINDS, counts) == counts
    assert weights_of([often, once], counts) == {often: 12, once: 3}
    assert weights_of([less], counts) == {less: 12}  # rare ones are missing


def test_an_impossible_number_of_graphs_is_refused_before_the_tower_is_built(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_traces, "load_recipe", lambda name: pytest.fail("built"))
    with pytest.raises(ConfigError, match="max_graphs"):
        bench_for(clock, max_graphs=0)
