"""Ladders and tiers: what a graph's key may round up to, and by how much."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmgraph.policy import ladder, segment_tier, seqlen_tier, smallest_fit, squared

tokens = st.integers(1, 1 << 20)


@st.composite
def ladder_arguments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    smallest = draw(st.integers(1, 1 << 15))
    largest = draw(st.integers(smallest, 1 << 20))
    return smallest, largest, draw(st.integers(1, 40)), draw(st.integers(1, 300))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 8, 4), (1, 2, 4, 8)),  # the plain powers of two
        ((1, 8, 1), (8,)),  # one budget has to hold the largest
        ((7, 7, 5), (7,)),  # equal ends are one budget
        ((1, 3, 9), (1, 2, 3)),  # more steps than integers
        ((3, 30, 2, 4), (4, 32)),  # both ends are rounded up
        ((10, 100, 1, 16), (112,)),  # so is a lone one
        ((256, 16384, 4, 4), (256, 1024, 4096, 16384)),  # a ratio of four
    ],
)
def test_ladder_by_hand(arguments: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert ladder(*arguments) == expected


@settings(deadline=None)
@given(ladder_arguments())
def test_ladder_ascends_in_at_most_count_multiples_between_its_ends(
    arguments: tuple[int, int, int, int],
) -> None:
    smallest, largest, count, granularity = arguments
    budgets = ladder(smallest, largest, count, granularity)
    assert 1 <= len(budgets) <= count
    assert all(budget % granularity == 0 for budget in budgets)
    assert all(a < b for a, b in pairwise(budgets))
    assert largest <= budgets[-1] < largest + granularity
    if count > 1:
        assert smallest <= budgets[0] < smallest + granularity


@settings(deadline=None)
@given(ladder_arguments())
def test_no_step_of_a_ladder_is_wider_than_its_ratio(
    arguments: tuple[int, int, int, int],
) -> None:
    """Up to rounding: half a token to the nearest integer, then up to the granularity."""
    smallest, largest, count, granularity = arguments
    budgets = ladder(smallest, largest, count, granularity)
    ratio = (largest / smallest) ** (1 / max(1, count - 1))
    for below, above in pairwise(budgets):
        assert above <= 1.000001 * ratio * (below + 0.5) + granularity


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 8, 4, 1),  # smallest too small
        (-4, 8, 4, 1),  # negative
        (9, 8, 4, 1),  # ends the wrong way round
        (1, 8, 0, 1),  # no budgets
        (1, 8, 4, 0),  # no granularity
    ],
)
def test_ladder_refuses_arguments_out_of_range(arguments: tuple[int, int, int, int]) -> None:
    expected = "a ladder needs 1 <= smallest <= largest.* got " + ", ".join(map(str, arguments))
    with pytest.raises(ValueError, match=expected):
        ladder(*arguments)


def test_segment_tiers_are_few_and_close() -> None:
    tiers = sorted({segment_tier(count) for count in range(1, 100)})
    assert tiers == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def test_no_segments_take_the_smallest_tier() -> None:
    assert segment_tier(0) == 1


@settings(deadline=None)
@given(st.integers(1, 1 << 20))
def test_segment_tier_is_an_idempotent_monotone_upper_bound(count: int) -> None:
    tier = segment_tier(count)
    assert count <= tier < 2 * count or count == tier == 1
    assert count <= 8 or tier <= 1.5 * count
    assert segment_tier(tier) == tier
    assert tier <= segment_tier(count + 1)


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [
        (1, 64, 1),  # the smallest
        (64, 64, 64),  # one image fills the budget
        (33, 64, 64),  # the next power of two
        (33, 48, 48),  # which is cut to the budget
        (65, 64, 65),  # a length above the budget still has to be covered
    ],
)
def test_seqlen_tier_by_hand(length: int, budget: int, expected: int) -> None:
    assert seqlen_tier(length, budget) == expected


@settings(deadline=None)
@given(tokens, tokens)
def test_seqlen_tier_is_an_idempotent_monotone_upper_bound(length: int, budget: int) -> None:
    tier = seqlen_tier(length, budget)
    assert length <= tier <= max(budget, length)
    assert tier < 2 * length or tier == length == 1
    assert seqlen_tier(tier, budget) == tier
    assert tier <= seqlen_tier(length + 1, budget)
    assert tier <= seqlen_tier(length, budget + 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=8, unique=True), st.integers(0, 120))
def test_smallest_fit_is_the_least_budget_that_holds_the_tokens(
    budgets: list[int], wanted: int
) -> None:
    expected = min((budget for budget in budgets if budget >= wanted), default=None)
    assert smallest_fit(sorted(budgets), wanted) == expected


def test_square_images_of_usual_sides_fill_the_default_budgets() -> None:
    budgets = squared(ladder(256, 16384, 16, 4), 4)
    assert len(budgets) == 16
    for patch, sides in ((14, (224, 336, 448, 1344)), (16, (384, 448, 512, 672, 768, 896, 1344))):
        assert {(side // patch) ** 2 for side in sides} <= set(budgets)


@given(ladder_arguments())
@example((82, 99, 16, 1))  # 81 and 100 are squares near the ends
@example((106, 192, 16, 4))
@example((4088, 47205, 25, 5))  # what a square replaces needn't be the step next to it
def test_squares_are_near_what_they_replace_and_leave_the_ends(
    arguments: tuple[int, int, int, int],
) -> None:
    before, granularity = ladder(*arguments), arguments[-1]
    budgets = squared(before, granularity)
    assert (budgets[0], budgets[-1], len(budgets) <= len(before)) == (before[0], before[-1], True)
    assert list(budgets) == sorted(set(budgets))
    for tokens in budgets:
        assert any(abs(step - tokens) <= 0.05 * step for step in before)
        assert tokens in before or tokens % granularity == 0
    assert squared((), 4) == ()


@pytest.mark.parametrize(
    ("tokens", "expected"), [(776, 784), (446, 446), (9410, 9216), (5, 5), (1000, 1024)]
)
def test_squares_by_hand(tokens: int, expected: int) -> None:
    assert squared((4, tokens, 99999), 4)[1] == expected
