"""What one grid adds, in closed form: what transformers returns, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import vision_utils

from mmgraph.encoders.grids import Grid, GridArrays, axis_taps

PATCH = 14
merges = st.integers(1, 4)


@st.composite
def grids_by_merge(draw: st.DrawFn) -> tuple[Grid, int]:
    merge = draw(merges)
    height, width = (merge * draw(st.integers(1, 20)) for _ in range(2))
    return (draw(st.integers(1, 3)), height, width), merge


@settings(deadline=None, max_examples=100)
@given(case=grids_by_merge(), temporal=st.booleans())
def test_positions_are_those_of_transformers(case: tuple[Grid, int], temporal: bool) -> None:
    grid, merge = case
    theirs = vision_utils.get_vision_position_ids(
        torch.tensor([grid]), merge, include_temporal=temporal
    )
    arrays = GridArrays(merge, temporal=temporal).arrays(grid)
    assert torch.equal(torch.from_numpy(arrays["position_ids"]), theirs)


@settings(deadline=None, max_examples=100)
@given(case=grids_by_merge(), side=st.integers(1, 9), rest=st.integers(0, PATCH - 1))
def test_windows_are_those_of_transformers(case: tuple[Grid, int], side: int, rest: int) -> None:
    grid, merge = case
    size = side * merge * PATCH + rest
    arrays = GridArrays(merge, window=side).arrays(grid)
    index, ends = vision_utils.get_vision_window_index(torch.tensor([grid]), merge, size, PATCH)
    assert torch.equal(torch.from_numpy(arrays["window_index"]), index)
    assert [0, *arrays["cu_window_seqlens"].tolist()] == ends.tolist()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("padding", ["border", "zeros"])
@pytest.mark.parametrize("align_corners", [True, False])
@settings(deadline=None, max_examples=40)
@given(case=grids_by_merge(), side=st.integers(1, 100))
def test_taps_are_those_of_transformers_to_the_last_bit(
    mode: str, padding: str, align_corners: bool, case: tuple[Grid, int], side: int
) -> None:
    grid, merge = case
    how: dict[str, Any] = {"mode": mode, "padding": padding, "align_corners": align_corners}
    arrays = GridArrays(merge, side=side, interpolation=how).arrays(grid)
    indices, weights = arrays["interp_indices"], arrays["interp_weights"]
    their_indices, their_weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), side, spatial_merge_size=merge, **how
    )
    assert torch.equal(torch.from_numpy(indices), their_indices)
    assert weights.dtype == np.float32
    assert torch.equal(torch.from_numpy(weights), their_weights)


def test_a_mode_that_nobody_knows_is_refused_as_transformers_refuses_it() -> None:
    with pytest.raises(ValueError, match="nearest"):
        axis_taps(4, 8, mode="nearest", padding="border", align_corners=True)


class Counting(GridArrays):
    """One that counts the tables it makes."""

    made = 0

    def _by_row(self, size: int) -> dict[str, Any]:
        self.made += 1
        return super()._by_row(size)

    def _by_column(self, size: int) -> dict[str, Any]:
        self.made += 1
        return super()._by_column(size)


@pytest.mark.parametrize("grid", [(1, 32, 32), (1, 64, 16), (1, 16, 64), (4, 10, 22)])
def test_new_grids_of_usual_shape_need_no_table_once_they_are_prepared(grid: Grid) -> None:
    how: dict[str, Any] = {
        "interpolation": {"mode": "bilinear", "padding": "border", "align_corners": False}
    }
    arrays = Counting(2, window=4, side=48, **how)
    arrays.prepare(256)
    arrays.prepare(1024)
    arrays.prepare(64)
    assert arrays.made == 2 * 32  # heights and widths of 2 to 64 patches, each of them once
    for name, values in arrays.arrays(grid).items():
        assert np.array_equal(values, GridArrays(2, window=4, side=48, **how).arrays(grid)[name])
    assert arrays.made == 2 * 32


def test_no_more_tables_are_prepared_than_are_kept() -> None:
    arrays = Counting(1)
    arrays.prepare(10**9)
    assert arrays.made == 2 * 128
    arrays.arrays((1, 2, 128))
    assert arrays.made == 2 * 128
