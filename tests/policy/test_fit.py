"""Fitted ladders: never dearer than any other one, and found in well under a second."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph.policy import EAGER, REPLAY, Cost, LinearCost, as_replays, expect, fit, ladder
from tests.work import lines_run

FREE = LinearCost(0, 0)


class Steps:
    """A cost that never falls, but is neither linear nor convex."""

    def __init__(self, steps: list[int]) -> None:
        self.costs = [sum(steps[:n]) for n in range(len(steps) + 1)]

    def __call__(self, tokens: int) -> float:
        return self.costs[min(tokens, len(self.costs) - 1)]

    def __repr__(self) -> str:
        return f"Steps({self.costs})"


linear_costs = st.builds(LinearCost, st.integers(0, 30), st.integers(0, 4))
costs = linear_costs | st.lists(st.integers(0, 9), max_size=16).map(Steps)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[int, int], int, dict[str, Any]]:
    sizes = draw(st.dictionaries(st.integers(1, 12), st.integers(0, 9), max_size=7))
    count, granularity = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    largest = draw(st.none() | st.integers(granularity, 14))
    allowed = range(granularity, (largest or 12) + 1, granularity)
    required = draw(st.lists(st.sampled_from(allowed), unique=True, max_size=min(2, count)))
    more = {"granularity": granularity, "largest": largest, "required": required}
    return sizes, count, {**more, "replay": draw(costs), "eager": draw(costs)}


def every_ladder(count: int, granularity: int, largest: int, required: list[int]) -> Any:
    allowed = range(granularity, largest + 1, granularity)
    for number in range(count + 1):
        for budgets in combinations(allowed, number):
            if set(required) <= set(budgets):
                yield budgets


@settings(deadline=None, max_examples=500)
@given(problems())
def test_no_ladder_costs_less_and_none_that_costs_the_same_has_fewer_budgets(
    problem: tuple[dict[int, int], int, dict[str, Any]],
) -> None:
    sizes, count, more = problem
    budgets = fit(sizes, count, **more)
    prices = {"replay": more["replay"], "eager": more["eager"]}
    largest = more["largest"] or 12 + more["granularity"]
    best = min(
        (expect(sizes, other, **prices).cost, len(other))
        for other in every_ladder(count, more["granularity"], largest, more["required"])
    )
    assert (expect(sizes, budgets, **prices).cost, len(budgets)) == best
    assert budgets in every_ladder(count, more["granularity"], largest, more["required"])


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.integers(1, 300), st.integers(1, 9), min_size=40), st.integers(1, 12))
def test_of_many_sizes_no_ladder_costs_less(sizes: dict[int, int], count: int) -> None:
    """Against the recurrence written down as it stands, in quadratic time."""
    ends = sorted(sizes)
    least = {0: 0.0}  # by the last budget, 0 before there is one
    best = sum(number * EAGER(size) for size, number in sizes.items())
    for _ in range(count):
        least = {
            end: min(
                cost + REPLAY(end) * sum(sizes[s] for s in ends if before < s <= end)
                for before, cost in least.items()
                if before < end
            )
            for end in ends
            if end > min(least)
        }
        for end, cost in least.items():
            best = min(best, cost + sum(sizes[s] * EAGER(s) for s in ends if s > end))
    assert expect(sizes, fit(sizes, count)).cost == best


@pytest.mark.parametrize(
    ("sizes", "count", "more", "expected"),
    [
        ({}, 4, {}, ()),  # nothing to serve
        ({100: 0}, 4, {}, ()),  # a size that never came
        ({100: 1}, 4, {}, (100,)),  # one size needs one budget
        ({100: 1}, 4, {"granularity": 16}, (112,)),  # rounded up
        ({100: 1, 90: 1}, 4, {"granularity": 16}, (96, 112)),  # each to its own multiple
        ({10: 1, 11: 1, 100: 1}, 2, {}, (11, 100)),  # the two close ones share
        ({10: 80, 11: 1, 100: 1}, 2, {}, (11, 100)),  # as long as there is little to pad
        ({10: 999, 60: 1, 100: 1}, 2, {}, (10, 100)),  # what comes often gets its own
        ({10: 1, 100: 1}, 1, {}, (100,)),  # padding is cheaper than eager mode here
        ({10: 100, 100: 1}, 1, {"eager": FREE, "replay": REPLAY}, ()),  # eager mode costs nothing
        ({10: 10**6, 9000: 1}, 1, {}, (10,)),  # one large call isn't worth padding all others
        ({10: 1, 100: 1}, 4, {"largest": 99}, (10,)),  # above the largest is eager mode
        ({100: 1}, 4, {"largest": 100, "granularity": 16}, ()),  # 96 doesn't hold it
        ({100: 1}, 4, {"required": (64,)}, (64, 100)),  # wanted, though nothing uses it
        ({100: 1}, 1, {"required": (128,)}, (128,)),  # and there is room for no other
    ],
)
def test_ladders_by_hand(
    sizes: dict[int, int], count: int, more: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert fit(sizes, count, **more) == expected


@pytest.mark.parametrize("required", [(), (64, 4096)])
def test_the_work_for_many_sizes_grows_with_their_number(
    required: tuple[int, ...],
) -> None:
    rng = random.Random(0)
    sizes = {n: rng.randint(1, 1000) for n in rng.sample(range(1, 1 << 17), 5000)}
    few = dict(sorted(sizes.items())[::10])
    budgets = fit(sizes, 32, required=required)
    assert lines_run(lambda: fit(sizes, 32, required=required)) < 15 * lines_run(
        lambda: fit(few, 32, required=required)
    )
    assert len(budgets) == 32
    assert all(a < b for a, b in pairwise(budgets))
    assert set(required) <= set(budgets)


def test_a_fitted_ladder_beats_an_even_one_on_lumpy_traffic() -> None:
    sizes = {256: 500, 1024: 300, 1028: 100, 5000: 60, 16384: 1}
    even = expect(sizes, ladder(256, 16384, 4))
    fitted = expect(sizes, fit(sizes, 4))
    assert fitted.cost < 0.9 * even.cost
    assert fitted.padding < 0.01 < even.padding


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (({10: 1}, 0), {}, "count and granularity must be at least 1, got 0, 1"),
        (({10: 1}, 1), {"granularity": 0}, "count and granularity must be at least 1, got 1, 0"),
        (({0: 1}, 1), {}, "sizes must be at least 1 and their counts not negative"),
        (({10: -1}, 1), {}, "sizes must be at least 1 and their counts not negative"),
        (({10: 1}, 1), {"required": (1, 2)}, "2 budgets are required, but only 1 allowed"),
        (
            ({10: 1}, 2),
            {"required": (8,), "granularity": 3},
            "required budgets must be multiples of 3 up to 8, got [8]",
        ),
        (
            ({10: 1}, 2),
            {"required": (16,), "largest": 8},
            "required budgets must be multiples of 1 up to 8, got [16]",
        ),
        (
            ({10: 1, 20: 1}, 2),
            {"replay": LinearCost(0, -1)},
            "a larger budget must not cost less than a smaller one",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(
    arguments: tuple[dict[int, int], int], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(*arguments, **more)


def test_expectations_by_hand() -> None:
    result = expect({10: 3, 16: 1, 100: 2}, (16,))
    assert (result.calls, result.above, result.tokens, result.computed) == (6, 2, 46, 64)
    assert result.cost == 4 * REPLAY(16) + 2 * EAGER(100) == 4 * 272 + 2 * 4196
    assert result.padding == pytest.approx(18 / 64)
    assert result.share_above == pytest.approx(1 / 3)


@pytest.mark.parametrize(("sizes", "budgets"), [({}, (8,)), ({9: 1}, ())])
def test_expectations_of_nothing_have_no_padding(
    sizes: dict[int, int], budgets: tuple[int, ...]
) -> None:
    result = expect(sizes, budgets)
    assert (result.padding, result.share_above) == (0, len(sizes))


@pytest.mark.parametrize(
    ("calls", "items", "expected"),
    [
        ({10: 2, 64: 1}, {10: 2, 64: 1}, {10: 2, 64: 1}),  # all of them fit
        ({150: 3}, {50: 9}, {64: 6, 22: 3}),  # two full replays and the rest
        ({128: 1}, {32: 4}, {64: 2}),  # no rest
        ({100: 2}, {100: 2}, {100: 2}),  # lone items can't be divided
        ({100: 3}, {100: 2, 50: 2}, {100: 2, 64: 1, 36: 1}),  # two can't, one can
        ({74: 1}, {64: 1, 10: 1}, {64: 1, 10: 1}),  # adds to what is there
    ],
)
def test_calls_above_the_largest_budget_are_divided(
    calls: dict[int, int], items: dict[int, int], expected: dict[int, int]
) -> None:
    assert as_replays(calls, items, 64) == expected


def test_a_cost_is_linear_in_the_tokens() -> None:
    cost: Cost = LinearCost(5, 0.5)
    assert (cost(0), cost(8)) == (5, 9)
