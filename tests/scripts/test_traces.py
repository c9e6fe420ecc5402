"""Traces follow the models' own rules, and the comparison on them runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from scripts.bench_traces import WAYS, main
from scripts.traces import MODELS, TRACES, make_trace
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
        f"--traces camera chat --device cpu --out {tmp_path}".split()
    )
    report = json.loads((tmp_path / "traces-qwen2_5_vl-tiny.json").read_text(encoding="utf-8"))
    assert list(report["traces"]) == ["camera", "chat"]
    for result in report["traces"].values():
        assert result["timed_kinds"] >= 1
        totals = result["total_ms"]
        assert list(totals) == [*WAYS, "best of each call"]
        assert totals["best of each call"] <= min(totals[way] for way in WAYS)
        assert all(result["ways"][way]["graphs"] > 0 for way in WAYS if way != "eager")
        assert result["ways"]["eager"]["worst"] == 1
        assert all(way["worst"] > 0 for way in result["ways"].values())
        assert all(0 <= way["padding"] < 1 for way in result["ways"].values())
    text = (tmp_path / "traces-qwen2_5_vl-tiny.md").read_text(encoding="utf-8")
    assert "| camera | 4 of 4 (1 kinds) |" in text
    assert "Command: `python -m scripts.bench_traces --model qwen2_5_vl:tiny" in text
