"""Traces follow the models' own rules, and the comparison on them runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

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
from scripts.traces_records import Result, Turn, in_turn, padding_of, weights_of
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


def way(clock: Clock, turns: list[Turn], seconds: float, reached: int = 1) -> Callable[..., Result]:
    """A way that takes `seconds` and times `reached` kinds, or what it may."""

    def make(bench: Bench, turn: Turn) -> Result:
        turns.append(turn)
        clock.now += seconds
        kinds = turn.kinds[: min(reached, turn.reach)]
        return Result(dict.fromkeys(kinds, 0.5), dict.fromkeys(kinds, (100, 25)))

    return make


NAMES = ("eager", "usual", "usual, our kernels", "mmgraph")


def test_what_a_way_does_not_use_goes_to_the_next(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Turn] = []
    takes = dict(zip(NAMES, (10.0, 4.0, 31.0, 0.0), strict=True))
    ways = {name: way(clock, turns, seconds) for name, seconds in takes.items()}
    monkeypatch.setattr(bench_traces, "WAYS", ways)
    bench = bench_for(clock, seconds=80.0, traces=["camera", "chat"])
    clock.now += 7  # building the tower isn't counted
    results = dict(bench.run(20))
    assert [turn.start - 107 for turn in turns] == [0, 10, 14, 45, 45, 55, 59, 90]
    shares = [turn.end - turn.start for turn in turns]
    # Of 40 s for the first trace, then of the 35 s that are left for the second.
    assert shares == pytest.approx([10, 30 / 3, 26 / 2, 0, 35 / 4, 25 / 3, 21 / 2, 0])
    halves = [turn.settled - turn.start for turn in turns]
    assert halves == pytest.approx([share / 2 for share in shares])
    assert [result["seconds"] for result in results.values()] == [45, 45]


def test_later_ways_need_no_more_kinds_than_earlier_ones_reached(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Turn] = []
    reached = dict(zip(NAMES, (5, 9, 3, 9), strict=True))
    ways = {name: way(clock, turns, 1.0, n) for name, n in reached.items()}
    monkeypatch.setattr(bench_traces, "WAYS", ways)
    ((_, result),) = bench_for(clock, kinds=8, traces=["photos"]).run(200)
    assert [turn.reach for turn in turns] == [8, 5, 5, 3]
    assert {len(turn.kinds) for turn in turns} == {8}  # budgets are for all of them
    assert result["timed_kinds"] == 3
    (first, *_) = turns
    timed = sum(first.counts[kind] for kind in first.kinds[:3])
    assert result["timed_calls"] == timed
    assert 0 < timed < result["calls"] == result["stands_for"] == 200
    assert result["total_ms"]["mmgraph"] == 200 * 500
    assert result["ways"]["mmgraph"]["padding"] == 0.25


KINDS = (((1, 4, 4),), ((1, 4, 8),), ((1, 8, 8),), ((1, 8, 12),))


class Tower:
    """Takes a second a call, and serves it from a graph of 100 tokens; some calls capture one."""

    def __init__(self, clock: Clock, captures: Collection[int] = ()) -> None:
        self.clock = clock
        self.captures = captures
        self.calls: list[int] = []
        self.tokens = 0
        self.graphs: list[GraphRecord] = []

    def __call__(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> None:
        self.clock.now += 1
        if len(self.calls) in self.captures:
            self.graphs.append(GraphRecord(GraphKey(len(self.calls)), 0, 0, 0.0))
        self.calls.append(len(hidden_states))
        self.tokens += len(hidden_states)

    def stats(self) -> EncoderStats:
        padding = 100 * len(self.calls) - self.tokens
        return EncoderStats(tokens=self.tokens, padding=padding, graphs=tuple(self.graphs))


@pytest.fixture
def timed(clock: Clock) -> Callable[..., tuple[Result, list[int]]]:
    """Times kinds in a number of seconds and returns the sizes of the calls as well."""

    def time(seconds: float, settling: int = 3, reach: int = 4) -> tuple[Result, list[int]]:
        bench = bench_for(clock)
        bench.tower = tower = Tower(clock)
        bench._patches = torch.empty(96, bench._width)
        now = clock.now
        turn = Turn(KINDS, Counter(KINDS * 5), reach, now, now + seconds / 2, now + seconds)
        cpu = torch.device("cpu")
        return bench._time(turn, cpu, settling=settling, stats=tower.stats), tower.calls

    return time


def test_half_of_a_share_is_for_settling(
    timed: Callable[..., tuple[Result, list[int]]],
) -> None:
    result, calls = timed(10)
    assert calls == [16] * 3 + [32] * 2 + [16] * 2 + [32] * 2 + [64] * 3
    assert list(result.seconds) == list(KINDS[:3])
    assert set(result.seconds.values()) == {1}
    assert result.settling_s == 6  # a kind that settling didn't reach is called once before
    assert result.tokens[KINDS[1]] == (200, 136)


def test_the_most_frequent_kind_is_settled_and_timed_without_any_time(
    timed: Callable[..., tuple[Result, list[int]]],
) -> None:
    result, calls = timed(0)
    assert list(result.seconds) == [KINDS[0]]
    assert calls == [16] * 5


def test_eager_mode_is_called_once_before_each_kind_is_timed(
    timed: Callable[..., tuple[Result, list[int]]],
) -> None:
    _, calls = timed(100, settling=1, reach=2)
    assert calls == [16] * 3 + [32] * 3


def test_a_rare_kind_is_timed_once_and_again_after_a_capture(clock: Clock) -> None:
    bench = bench_for(clock)
    bench.tower = tower = Tower(clock, captures={0, 4, 6})
    bench._patches = torch.empty(96, bench._width)
    counts = Counter({KINDS[0]: 3, KINDS[1]: 2, KINDS[2]: 1, KINDS[3]: 1})
    turn = Turn(KINDS, counts, 4, clock.now, clock.now + 50, clock.now + 100)
    result = bench._time(turn, torch.device("cpu"), settling=2, stats=tower.stats)
    # Two before and two timed; one with a capture and one without; likewise; one is enough.
    assert tower.calls == [16] * 4 + [32] * 2 + [64] * 2 + [96]
    assert result.tokens[KINDS[1]] == (100, 68)


@pytest.mark.parametrize("of_eager", [1.05, 1.5])
def test_what_takes_as_long_as_eager_mode_is_timed_in_turn_with_it(
    clock: Clock, of_eager: float
) -> None:
    bench = bench_for(clock)
    bench.tower = tower = Tower(clock)
    bench._patches = torch.empty(96, bench._width)
    eager = {KINDS[0]: of_eager}
    turn = Turn(KINDS, Counter(KINDS * 3), 1, clock.now, clock.now + 50, clock.now + 100, eager)
    result = bench._time(turn, torch.device("cpu"), settling=2, stats=tower.stats)
    assert result.against_eager == ({KINDS[0]: 1.0} if of_eager < 1.1 else {})
    assert len(tower.calls) == 2 + 2 + (8 if of_eager < 1.1 else 0)


def test_nothing_waits_for_a_call_without_captures(clock: Clock) -> None:
    bench = bench_for(clock)
    bench.tower = tower = Tower(clock, captures=range(9))
    bench._patches = torch.empty(96, bench._width)
    turn = Turn(KINDS, Counter(KINDS), 1, clock.now, clock.now + 50, clock.now + 100)
    bench._time(turn, torch.device("cpu"), settling=2, stats=tower.stats)
    assert tower.calls == [16] * 3


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


def test_padding_is_of_the_calls_as_often_as_they_occur() -> None:
    small, large, rare = KINDS[:3]
    result = Result(tokens={small: (32, 0), large: (64, 32), rare: (128, 64)})
    counts = Counter({small: 6, large: 2, rare: 1})
    assert padding_of(result, [small, large], counts) == 64 / (6 * 32 + 2 * 64)
    result = Result(tokens={small: (0, 0)})  # all in eager mode
    assert padding_of(result, [small], counts) == 0


def test_an_impossible_number_of_graphs_is_refused_before_the_tower_is_built(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_traces, "load_recipe", lambda name: pytest.fail("built"))
    with pytest.raises(ConfigError, match="max_graphs"):
        bench_for(clock, max_graphs=0)
