"""Metadata of packed towers: every data-dependent tensor, from the grids as Python ints.

Towers of transformers take these tensors from their keyword arguments instead of computing them
(``transformers/vision_utils.py``); which of them a tower wants shows in its attributes, as in
``transformers/exporters/utils.py``. The values for one grid come from transformers' own functions,
run once on the CPU; a call's metadata is those arrays, shifted and laid end to end in one block of
bytes, so that an upload is one copy.

Rows beyond the real ones get values that are in range: position 0, their own place in the window
order, a grid of one merge group. No segment holds them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from mmgraph.types import EncoderItemSpec, GraphKey

__all__ = ["Grid", "GridArrays", "PackedMetadata"]

Grid = tuple[int, ...]
"""(t, h, w) in patches."""

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 16
_CACHED_GRIDS = 256


@dataclass(frozen=True, slots=True)
class GridArrays:
    """What one item contributes, with offsets counted from its own first patch.

    Attributes:
        position_ids: (T, 2) or (T, 3) int64.
        seqlens: (t,) or (1,) lengths of its full-attention segments.
        window_index: (M,) int64 order of its merge groups, or ``None`` without windows.
        window_seqlens: Lengths of its windows, or ``None``.
        interp_indices: (T, taps) int64, or ``None`` without an interpolated position table.
        interp_weights: (T, taps) float32, or ``None``.
    """

    position_ids: npt.NDArray[np.int64]
    seqlens: tuple[int, ...]
    window_index: npt.NDArray[np.int64] | None
    window_seqlens: npt.NDArray[np.int64] | None
    interp_indices: npt.NDArray[np.int64] | None
    interp_weights: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class PackedMetadata:
    """Builds the metadata of one tower."""

    def __init__(self, tower: nn.Module) -> None:
        self.merge_size = int(_find(tower, "spatial_merge_size") or 1)
        self._window_size: Any = _find(tower, "window_size")
        self._patch_size: Any = _find(tower, "patch_size")
        self._windows = self._window_size is not None and self._patch_size is not None
        self._side = _find(tower, "num_grid_per_side")
        self._interpolation = {
            "mode": _find(tower, "interpolation_mode") or "bilinear",
            "padding": _find(tower, "interpolation_padding") or "border",
            "align_corners": _find(tower, "interpolation_align_corners") is True,
        }
        self._merge_temporal = bool(getattr(tower, "merge_temporal", False))
        self._include_temporal = bool(
            getattr(tower, "include_temporal", _find(tower, "axis_dim") is not None)
        )
        self.arrays = lru_cache(maxsize=_CACHED_GRIDS)(self._arrays)
        self.item = lru_cache(maxsize=4096)(self._item)
        self._layout = lru_cache(maxsize=256)(self._fields)
        self._is_by_frame = lru_cache(maxsize=4096)(self._compare_with_frames)

    def num_bytes(self, key: GraphKey) -> int:
        """Size of the block of `key` in bytes."""
        return self._layout(key)[-1].stop

    def fill(self, block: Bytes, grids: tuple[Grid, ...], key: GraphKey) -> None:
        """Write the metadata of `grids` into `block`, which has `num_bytes(key)` bytes."""
        out = {f.name: _view(block, f) for f in self._layout(key)}
        items = [self.arrays(grid) for grid in grids]
        self._fill_segments(out, grids, items)
        tokens = 0
        for item in items:
            stop = tokens + item.position_ids.shape[0]
            out["position_ids"][tokens:stop] = item.position_ids
            if item.interp_indices is not None:
                out["interp_indices"][tokens:stop] = item.interp_indices
                out["interp_weights"][tokens:stop] = item.interp_weights
            tokens = stop
        out["position_ids"][tokens:] = 0
        if self._side is not None:
            out["interp_indices"][tokens:] = 0
            out["interp_weights"][tokens:] = 0
        if self._windows:
            self._fill_windows(out, items)

    def example(self, key: GraphKey) -> Bytes:
        """A block that is valid for `key`: single merge groups as far as the tables reach."""
        block = np.zeros(self.num_bytes(key), dtype=np.uint8)
        group = self.merge_size**2
        count = min(key.token_budget // group, *key.segment_capacity)
        self.fill(block, ((1, self.merge_size, self.merge_size),) * max(1, count), key)
        return block

    def kwargs(self, block: torch.Tensor, key: GraphKey) -> dict[str, Any]:
        """The tower's keyword arguments as views of the block on its device."""
        kwargs: dict[str, Any] = {
            f.name: block[f.start : f.stop].view(f.dtype).view(f.shape) for f in self._layout(key)
        }
        kwargs["max_seqlen"] = key.max_seqlen[0]
        if self._windows:
            kwargs["max_window_seqlen"] = key.max_seqlen[1]
        return kwargs

    def _item(self, grid: Grid) -> EncoderItemSpec | None:
        """The planner's view of a grid, or ``None`` if no image can have it."""
        if len(grid) != 3 or min(grid) < 1 or any(side % self.merge_size for side in grid[1:]):
            return None
        arrays = self.arrays(grid)
        counts, longest = [len(arrays.seqlens)], [max(arrays.seqlens)]
        if arrays.window_seqlens is not None:
            counts.append(len(arrays.window_seqlens))
            longest.append(self._window_area())
        t, h, w = grid
        return EncoderItemSpec(t * h * w, tuple(counts), tuple(longest), grid)

    def parts(self, grid: Grid, max_tokens: int) -> list[Grid] | None:
        """Videos of at most `max_tokens` that in a row are the same to the tower as one of `grid`.

        ``None`` if there are none: a frame is larger, or frames aren't independent.
        """
        t, h, w = grid
        frames = max_tokens // (h * w)
        if not 1 <= frames < t or not self._is_by_frame(grid):
            return None
        full: list[Grid] = [(frames, h, w)] * (t // frames)
        return [*full, (t % frames, h, w)] if t % frames else full

    def _compare_with_frames(self, grid: Grid) -> bool:
        """Whether the metadata of a video is that of its frames as images, one after another."""
        t, h, w = grid
        whole, frame = self.arrays(grid), self.arrays((1, h, w))
        groups = h * w // self.merge_size**2
        columns = [
            (whole.position_ids, frame.position_ids, 0),
            (whole.window_index, frame.window_index, groups),
            (whole.window_seqlens, frame.window_seqlens, 0),
            (whole.interp_indices, frame.interp_indices, 0),
            (whole.interp_weights, frame.interp_weights, 0),
        ]
        return whole.seqlens == frame.seqlens * t and all(
            np.array_equal(a, np.concatenate([b + i * step for i in range(t)]))
            for a, b, step in columns
            if a is not None and b is not None
        )

    def _window_area(self) -> int:
        side = int(self._window_size) // self.merge_size // int(self._patch_size)
        return max(1, side * side) * self.merge_size**2

    def _arrays(self, grid: Grid) -> GridArrays:
        from transformers import vision_utils

        t, h, w = grid
        window_index = window_seqlens = indices = weights = None
        with _on_cpu(), torch.no_grad():
            thw = torch.tensor([grid], dtype=torch.int64)
            positions = vision_utils.get_vision_position_ids(
                thw, self.merge_size, include_temporal=self._include_temporal
            )
            if self._windows:
                index, cu_windows = vision_utils.get_vision_window_index(
                    thw, self.merge_size, int(self._window_size), int(self._patch_size)
                )
                window_index, window_seqlens = index.numpy(), cu_windows.diff().long().numpy()
            if self._side is not None:
                taps = vision_utils.get_vision_interpolation_indices_and_weights(
                    thw, self._side, spatial_merge_size=self.merge_size, **self._interpolation
                )
                indices, weights = (x.numpy() for x in taps)
        seqlens = (t * h * w,) if self._merge_temporal else (h * w,) * t
        return GridArrays(
            positions.numpy(), seqlens, window_index, window_seqlens, indices, weights
        )

    def _fields(self, key: GraphKey) -> tuple[_Field, ...]:
        tokens, segments = key.token_budget, key.segment_capacity[0]
        taps = 16 if self._interpolation["mode"] == "bicubic" else 4
        shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            # One grid a segment, and one for the rows of none: some towers look it up by row.
            ("grid_thw", (segments + 1, 3), torch.int64),
            ("cu_seqlens", (segments + 1,), torch.int32),
            ("position_ids", (tokens, 3 if self._include_temporal else 2), torch.int64),
        ]
        if self._windows:
            shapes.append(("window_index", (tokens // self.merge_size**2,), torch.int64))
            shapes.append(("cu_window_seqlens", (key.segment_capacity[1] + 1,), torch.int32))
        if self._side is not None:
            shapes.append(("interp_indices", (tokens, taps), torch.int64))
            shapes.append(("interp_weights", (tokens, taps), torch.float32))
        fields, start = [], 0
        for name, shape, dtype in shapes:
            stop = start + int(np.prod(shape)) * dtype.itemsize
            fields.append(_Field(name, shape, dtype, start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return tuple(fields)

    def _fill_segments(
        self, out: dict[str, npt.NDArray[Any]], grids: tuple[Grid, ...], items: list[GridArrays]
    ) -> None:
        _fill_cumulative(out["cu_seqlens"], [n for item in items for n in item.seqlens])
        pairs = zip(grids, items, strict=True)
        rows = [(1, h, w) for (_, h, w), item in pairs for _ in item.seqlens]
        out["grid_thw"][:] = (1, self.merge_size, self.merge_size)
        out["grid_thw"][: len(rows)] = rows

    def _fill_windows(self, out: dict[str, npt.NDArray[Any]], items: list[GridArrays]) -> None:
        index, groups = out["window_index"], 0
        for item in items:
            assert item.window_index is not None
            stop = groups + len(item.window_index)
            index[groups:stop] = item.window_index + groups
            groups = stop
        index[groups:] = np.arange(groups, len(index))
        lengths = [item.window_seqlens for item in items if item.window_seqlens is not None]
        _fill_cumulative(out["cu_window_seqlens"], np.concatenate(lengths) if lengths else [])


def _on_cpu() -> AbstractContextManager[Any]:
    """Within the block tensors are made on the CPU; where they are anyway that costs nothing."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _fill_cumulative(out: npt.NDArray[Any], lengths: Any) -> None:
    """Cumulative `lengths` from 0, the last one repeated to the end: empty segments."""
    out[0] = 0
    out[1 : len(lengths) + 1] = np.cumsum(lengths)
    out[len(lengths) + 1 :] = out[len(lengths)]


def _view(block: Bytes, field: _Field) -> npt.NDArray[Any]:
    part: npt.NDArray[Any] = block[field.start : field.stop].view(_NUMPY[field.dtype])
    return part.reshape(field.shape)


def _find(tower: nn.Module, name: str) -> Any | None:
    """The first value other than ``None`` of the attribute on the tower or a submodule."""
    values = (getattr(module, name, None) for module in tower.modules())
    return next((value for value in values if value is not None), None)
