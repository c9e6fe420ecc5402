"""Thousands of random calls, bad ones among them: never a wrong value, and every item counted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from mmgraph import EncoderStats, MMGraphError
from tests.properties.layouts import CONFIGS, LAYOUTS, Call, Layout


def outcome(run: Any, call: Call) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return run(call)
    except Exception as error:
        return error


def assert_same(ours: Any, eager: Any, *, may_be_refused: bool) -> None:
    """Equal values, or the very kind of error that eager mode raises, or one of ours."""
    if isinstance(ours, Exception):
        refused = isinstance(ours, MMGraphError) and may_be_refused
        assert refused or type(ours) is type(eager), (ours, eager)
        return
    assert not isinstance(eager, Exception), eager
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.numel():
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


def assert_reconciled(stats: EncoderStats, before: EncoderStats, calls: int | None) -> None:
    assert stats.items == stats.hits + sum(stats.misses.values())
    assert calls is None or stats.calls == before.calls + calls
    assert stats.hits >= before.hits
    assert stats.padding >= 0
    assert sum(stats.call_sizes.values()) <= stats.calls
    for reason, number in before.misses.items():
        assert stats.misses[reason] >= number
    held = sum(graph.replays * graph.key.token_budget for graph in stats.graphs)
    assert held <= stats.tokens + stats.padding
    assert len(stats.graphs) <= 64


def run(layout: Layout, random: Random, calls: int, *, is_runner: bool) -> None:
    for number in range(calls):
        call = layout.call(random)
        before = layout.stats()
        with torch.no_grad():
            ours = outcome(layout.ours, call)
            after = layout.stats()
            refused = layout.contradicts_itself(call)
            assert_same(ours, outcome(layout.eager, call), may_be_refused=refused)
        failed = isinstance(ours, Exception)
        assert_reconciled(after, before, None if is_runner else 1)
        seen = after.items - before.items
        if failed or layout.num_items(call) == 0:
            assert 0 <= seen <= layout.num_items(call) + 1
        else:
            assert seen == layout.num_items(call), (call, after.misses, before.misses)
        if number % 997 == 500:
            layout.clear()


def check(name: str, config: dict[str, Any], seed: int, calls: int) -> None:
    layout = LAYOUTS[name](config)
    try:
        run(layout, Random(seed), calls, is_runner=name == "runner")
    finally:
        layout.close()
    assert layout.stats().hits


@pytest.mark.parametrize(
    ("name", "config", "calls"),
    [("engine", 0, 150), ("runner", 1, 100), ("rows", 1, 60), ("packed", 2, 60)],
)
def test_a_few_hundred_calls(name: str, config: int, calls: int) -> None:
    check(name, CONFIGS[config], seed=1, calls=calls)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_ten_thousand_calls(name: str, config: dict[str, Any]) -> None:
    check(name, config, seed=2, calls=900)  # 4 layouts x 3 configs x 900 = 10,800
