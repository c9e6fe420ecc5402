"""Metadata of packed towers: what transformers computes for all items at once, and safe padding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import vision_utils

from mmgraph import GraphKey
from mmgraph.encoders.metadata import Grid, PackedMetadata
from mmgraph.policy import segment_tier, seqlen_tier
from mmgraph.recipes import load_recipe


@dataclass(frozen=True)
class Wanted:
    """What the towers of a family compute for themselves, read off their forward by hand."""

    window: int | None = None
    interpolation: dict[str, Any] = field(default_factory=dict)


TABLE_8_8 = {
    "num_grid_per_side": 8,
    "mode": "bilinear",
    "align_corners": True,
    "spatial_merge_size": 2,
}
FAMILIES = {
    "qwen2_vl": Wanted(),  # rotary positions only
    "qwen2_5_vl": Wanted(window=56),  # windows of 2 x 2 merge groups
    "qwen3_vl": Wanted(interpolation=TABLE_8_8),  # a learned table of 8 x 8 positions
    "qwen3_5": Wanted(interpolation=TABLE_8_8),
    "glm4v": Wanted(),  # looks its grid up by row
}
MERGE, PATCH = 2, 14
GRIDS: dict[str, list[Grid]] = {
    "one": [(1, 8, 8)],
    "smallest": [(1, 2, 2)],
    "not square": [(1, 4, 22), (1, 18, 2)],
    "not a multiple of the window": [(1, 6, 10), (1, 10, 6)],
    "video": [(4, 8, 6)],
    "videos and images": [(3, 4, 6), (1, 2, 2), (5, 2, 8), (1, 12, 4)],
    "the same twice": [(1, 6, 4), (1, 6, 4)],
    "many": [(1, 2, 2)] * 9,
    "larger than the position table": [(1, 30, 20)],
}
sides = st.integers(1, 9).map(lambda groups: groups * MERGE)
grids_of_calls = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=4)


@functools.cache
def metadata_of(family: str) -> PackedMetadata:
    return PackedMetadata(load_recipe(f"{family}:tiny").build_encoder())


def key_for(metadata: PackedMetadata, grids: list[Grid], padding: int = 0) -> GraphKey:
    """The key that serves `grids` with `padding` rows and as many empty segments as tiers give."""
    items = [metadata.item(grid) for grid in grids]
    assert all(item is not None for item in items)
    budget = sum(item.num_tokens for item in items) + padding
    segments = zip(*(item.num_segments for item in items), strict=True)
    lengths = zip(*(item.max_seqlen for item in items), strict=True)
    return GraphKey(
        budget,
        tuple(segment_tier(sum(kind) + padding) for kind in segments),
        tuple(seqlen_tier(max(kind), budget) for kind in lengths),
    )


def filled(
    metadata: PackedMetadata, grids: list[Grid], key: GraphKey, before: int = 0xA5
) -> dict[str, Any]:
    """The keyword arguments of a tower, from a block that held something else before."""
    block = np.full(metadata.num_bytes(key), before, dtype=np.uint8)
    metadata.fill(block, tuple(grids), key)
    return metadata.kwargs(torch.from_numpy(block), key)


def expected(family: str, grids: list[Grid]) -> dict[str, torch.Tensor]:
    """What the functions of transformers return for the grid tensor of the whole call."""
    wanted, thw = FAMILIES[family], torch.tensor(grids)
    values = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(thw),
        "position_ids": vision_utils.get_vision_position_ids(thw, MERGE),
    }
    if wanted.window is not None:
        index, windows = vision_utils.get_vision_window_index(thw, MERGE, wanted.window, PATCH)
        values |= {"window_index": index, "cu_window_seqlens": windows}
    if wanted.interpolation:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            thw, **wanted.interpolation
        )
        values |= {"interp_indices": indices, "interp_weights": weights}
    return values


def assert_as_transformers(family: str, grids: list[Grid], padding: int) -> None:
    metadata = metadata_of(family)
    ours = filled(metadata, grids, key_for(metadata, grids, padding))
    theirs = expected(family, grids)
    assert {n for n, v in ours.items() if isinstance(v, torch.Tensor)} == {*theirs, "grid_thw"}
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name][: len(value)], value), name
    assert_padding_is_harmless(ours, theirs)


def assert_padding_is_harmless(
    ours: dict[str, Any], theirs: dict[str, torch.Tensor], table: int = 64
) -> None:
    """Empty segments, and values in range for the rows that no segment holds."""
    for name in {"cu_seqlens", "cu_window_seqlens"} & theirs.keys():
        assert (ours[name][len(theirs[name]) :] == theirs[name][-1]).all(), name
    tokens = len(theirs["position_ids"])
    assert (ours["position_ids"][tokens:] == 0).all()
    if "window_index" in theirs:
        index = ours["window_index"]
        assert torch.equal(index.sort().values, torch.arange(len(index)))
        assert torch.equal(index[tokens // 4 :], torch.arange(tokens // 4, len(index)))
    if "interp_indices" in theirs:
        assert ours["interp_indices"].min() >= 0
        assert ours["interp_indices"].max() < table
        assert (ours["interp_weights"][tokens:] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [0, 4, 24])
@pytest.mark.parametrize("name", GRIDS)
def test_metadata_is_what_transformers_computes_for_the_whole_call(
    family: str, padding: int, name: str
) -> None:
    assert_as_transformers(family, GRIDS[name], padding)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(grids=grids_of_calls, padding=st.integers(0, 5).map(lambda groups: groups * MERGE**2))
def test_metadata_of_any_grids_is_what_transformers_computes(
    family: str, grids: list[Grid], padding: int
) -> None:
    assert_as_transformers(family, grids, padding)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_segment_has_its_own_grid_and_the_rest_a_merge_group(family: str) -> None:
    metadata, grids = metadata_of(family), [(2, 4, 6), (1, 8, 2)]
    key = key_for(metadata, grids, 20)
    rows = filled(metadata, grids, key)["grid_thw"].tolist()
    assert len(rows) == key.segment_capacity[0] + 1
    assert rows[:3] == [[1, 4, 6], [1, 4, 6], [1, 8, 2]]
    assert rows[3:] == [[1, 2, 2]] * (len(rows) - 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_on_lengths_are_those_of_the_key(family: str) -> None:
    metadata = metadata_of(family)
    windows = FAMILIES[family].window is not None
    key = GraphKey(64, (2, 8) if windows else (2,), (48, 16) if windows else (48,))
    kwargs = filled(metadata, [(1, 4, 4)], key)
    assert kwargs["max_seqlen"] == 48
    assert kwargs.get("max_window_seqlen") == (16 if windows else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_nothing_of_an_earlier_call(family: str) -> None:
    metadata = metadata_of(family)
    key = key_for(metadata, GRIDS["videos and images"], 8)
    block = np.zeros(metadata.num_bytes(key), dtype=np.uint8)
    metadata.fill(block, tuple(GRIDS["videos and images"]), key)
    metadata.fill(block, ((1, 2, 4),), key)
    again, fresh = metadata.kwargs(torch.from_numpy(block), key), filled(metadata, [(1, 2, 4)], key)
    for name, value in fresh.items():
        assert torch.equal(torch.as_tensor(again[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("budget", "segments"),
    [
        (4, 1),  # one merge group
        (64, 1),  # fewer segments than groups
        (64, 16),  # as many
        (64, 64),  # more: the table can't be filled
        (1024, 8),
    ],
)
def test_the_example_of_a_key_is_valid_for_it(family: str, budget: int, segments: int) -> None:
    metadata = metadata_of(family)
    kinds = 1 if FAMILIES[family].window is None else 2
    key = GraphKey(budget, (segments,) * kinds, (16,) * kinds)
    kwargs = metadata.kwargs(torch.from_numpy(metadata.example(key)), key)
    count = min(budget // 4, segments)
    assert kwargs["cu_seqlens"].diff().tolist() == [4] * count + [0] * (segments - count)
    assert_padding_is_harmless(kwargs, expected(family, [(1, 2, 2)] * count))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_of_a_smaller_key_is_no_larger(family: str) -> None:
    metadata = metadata_of(family)
    kinds = 1 if FAMILIES[family].window is None else 2
    sizes = [
        metadata.num_bytes(GraphKey(budget, (segments,) * kinds, (budget,) * kinds))
        for budget, segments in [(4, 1), (64, 1), (64, 16), (256, 16), (256, 64)]
    ]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("family", "grid", "segments", "lengths"),
    [
        ("qwen2_vl", (1, 6, 4), (1,), (24,)),  # an image
        ("qwen2_vl", (3, 6, 4), (3,), (24,)),  # a video attends by frame
        ("qwen2_5_vl", (1, 8, 8), (1, 4), (64, 16)),  # whole windows
        ("qwen2_5_vl", (1, 6, 10), (1, 6), (60, 16)),  # cut windows are bounded by whole ones
        ("qwen2_5_vl", (2, 2, 2), (2, 2), (4, 16)),  # windows end with their frame
    ],
)
def test_the_planner_sees_segments_of_each_kind(
    family: str, grid: Grid, segments: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    item = metadata_of(family).item(grid)
    assert item is not None
    assert (item.num_tokens, item.geometry) == (grid[0] * grid[1] * grid[2], grid)
    assert (item.num_segments, item.max_seqlen) == (segments, lengths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grid", [grid for grids in GRIDS.values() for grid in grids])
def test_the_planners_bounds_hold(family: str, grid: Grid) -> None:
    item = metadata_of(family).item(grid)
    assert item is not None
    theirs = expected(family, [grid])
    for kind, name in enumerate(sorted({"cu_seqlens", "cu_window_seqlens"} & theirs.keys())):
        assert item.num_segments[kind] == len(theirs[name]) - 1
        assert item.max_seqlen[kind] >= theirs[name].diff().max()


@pytest.mark.parametrize(
    "grid",
    [
        (1, 3, 4),  # not a whole number of merge groups
        (1, 4, 5),
        (0, 4, 4),  # no frame
        (1, 0, 4),  # no rows
        (1, -4, -4),  # negative, with a positive product
        (4, 4),  # no time
        (1, 4, 4, 4),  # too many axes
        (),
    ],
)
def test_a_grid_that_no_image_has_is_no_item(grid: Grid) -> None:
    assert metadata_of("qwen2_vl").item(grid) is None


def test_building_metadata_touches_no_random_number_and_no_default_device() -> None:
    metadata = PackedMetadata(load_recipe("qwen3_vl:tiny").build_encoder())
    state = torch.get_rng_state()
    with torch.device("meta"):
        item = metadata.item((1, 4, 4))
        assert item is not None
        arrays = metadata.arrays((1, 4, 4))
    assert np.allclose(arrays["interp_weights"].sum(axis=1), 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_do_not_hang_on_the_default_device(family: str) -> None:
    metadata, grid = metadata_of(family), (1, 14, 22)
    expected = metadata.arrays(grid)
    metadata.arrays.cache_clear()
    with torch.device("meta"):
        arrays = metadata.arrays(grid)
    for name, values in expected.items():
        np.testing.assert_equal(arrays[name], values)
