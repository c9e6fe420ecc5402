"""Costs between measurements, and beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmgraph.policy import Curve

points = st.dictionaries(st.integers(1, 10_000), st.floats(1e-4, 1.0), min_size=1, max_size=6)


@given(points, st.booleans())
def test_what_was_measured_is_taken_as_it_is(measured: dict[int, float], floor: bool) -> None:
    curve = Curve(measured, 256, floor=floor)
    assert {tokens: curve(tokens) for tokens in measured} == measured


@pytest.mark.parametrize(
    ("measured", "tokens", "cost"),
    [
        ({100: 1.0, 300: 2.0}, 150, 1.25),  # on a straight line between
        ({100: 2.0, 300: 1.0}, 200, 1.5),  # also where it falls
        ({100: 1.0, 300: 2.0}, 700, 4.0),  # beyond: proportional, but for 100 tokens more
        ({100: 1.0}, 300, 2.0),
        ({300: 2.0}, 100, 1.0),
        ({300: 2.0, 500: 9.0}, 100, 1.0),
    ],
)
def test_other_sizes_by_hand(measured: dict[int, float], tokens: int, cost: float) -> None:
    assert Curve(measured, 100)(tokens) == pytest.approx(cost)


def test_with_a_floor_nothing_small_is_cheaper_than_what_was_measured() -> None:
    curve = Curve({300: 2.0, 500: 9.0}, 100, floor=True)
    assert [curve(tokens) for tokens in (1, 299, 300, 400)] == [2.0, 2.0, 2.0, 5.5]
