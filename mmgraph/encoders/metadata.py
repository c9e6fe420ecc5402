"""Metadata of packed towers: every data-dependent tensor, from the grids as Python ints.

Towers of transformers take these tensors from their keyword arguments instead of computing them
(``transformers/vision_utils.py``); which of them a tower wants shows in its attributes, as in
``transformers/exporters/utils.py``. What one grid adds is computed once (``grids.py``); a call's
metadata is those arrays, shifted and laid end to end in one block of bytes, so that an upload is
one copy.

Rows beyond the real ones get values that are in range: position 0, their own place in the window
order, a grid of one merge group. No segment holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from mmgraph.encoders.grids import Array, Grid, axis_taps, combined_taps, position_ids, windows
from mmgraph.types import EncoderItemSpec, GraphKey

__all__ = ["Grid", "PackedMetadata"]

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 16
_CACHED_GRIDS = 256


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def of(self, block: Bytes) -> Array:
        """The field as a view of `block`."""
        return np.ndarray(self.shape, _NUMPY[self.dtype], block.data, self.start)


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class PackedMetadata:
    """Builds the metadata of one tower."""

    def __init__(self, tower: nn.Module) -> None:
        self.merge_size = int(_find(tower, "spatial_merge_size") or 1)
        self._group = self.merge_size**2
        window, patch = _find(tower, "window_size"), _find(tower, "patch_size")
        self._window = 0  # side of a window in merge groups
        if window is not None and patch is not None:
            self._window = max(1, int(window) // self.merge_size // int(patch))
        self._per_step = {"cu_seqlens": 1, "cu_window_seqlens": 1, "window_index": self._group}
        self._side = _find(tower, "num_grid_per_side")
        self._interpolation: dict[str, Any] = {
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
        self._taps = lru_cache(maxsize=_CACHED_GRIDS)(self._axis)
        self._layout = lru_cache(maxsize=256)(self._fields)
        self._is_by_frame = lru_cache(maxsize=4096)(self._compare_with_frames)

    def num_bytes(self, key: GraphKey) -> int:
        """Size of the block of `key` in bytes."""
        return self._layout(key)[-1].stop

    def fill(self, block: Bytes, grids: tuple[Grid, ...], key: GraphKey) -> None:
        """Write the metadata of `grids` into `block`, which has `num_bytes(key)` bytes."""
        items = [self.arrays(grid) for grid in grids]
        tokens = list(accumulate([t * h * w for t, h, w in grids], initial=0))
        rest: dict[str, Any] = {"grid_thw": (1, self.merge_size, self.merge_size)}
        for field in self._layout(key):
            name, out, start = field.name, field.of(block), 0
            if name.startswith("cu_"):
                out[0], out, rest[name] = 0, out[1:], tokens[-1]
            for item, before in zip(items, tokens, strict=False):
                stop = start + len(item[name])
                out[start:stop] = self._shifted(name, item, before)
                start = stop
            if start < len(out):
                is_order = name == "window_index"
                out[start:] = np.arange(start, len(out)) if is_order else rest.get(name, 0)

    def example(self, key: GraphKey) -> Bytes:
        """A block that is valid for `key`: single merge groups as far as the tables reach."""
        block = np.zeros(self.num_bytes(key), dtype=np.uint8)
        count = min(key.token_budget // self._group, *key.segment_capacity)
        self.fill(block, ((1, self.merge_size, self.merge_size),) * max(1, count), key)
        return block

    def kwargs(self, block: torch.Tensor, key: GraphKey) -> dict[str, Any]:
        """The tower's keyword arguments as views of the block on its device."""
        kwargs: dict[str, Any] = {
            f.name: block[f.start : f.stop].view(f.dtype).view(f.shape) for f in self._layout(key)
        }
        kwargs["max_seqlen"] = key.max_seqlen[0]
        if self._window:
            kwargs["max_window_seqlen"] = key.max_seqlen[1]
        return kwargs

    def _item(self, grid: Grid) -> EncoderItemSpec | None:
        """The planner's view of a grid, or ``None`` if no image can have it."""
        if len(grid) != 3 or min(grid) < 1 or any(side % self.merge_size for side in grid[1:]):
            return None
        arrays = self.arrays(grid)
        tokens = len(arrays["position_ids"])
        counts = [len(ends) for name, ends in arrays.items() if name.startswith("cu_")]
        longest = [tokens // counts[0], self._window**2 * self._group]
        return EncoderItemSpec(tokens, tuple(counts), tuple(longest[: len(counts)]), grid)

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
        return all(
            np.array_equal(
                values, np.concatenate([self._shifted(name, frame, i * h * w) for i in range(t)])
            )
            for name, values in whole.items()
        )

    def _shifted(self, name: str, item: Mapping[str, Array], tokens: int) -> Array:
        """An array of `item` where it comes after `tokens` tokens of others."""
        per_step = self._per_step.get(name)
        return item[name] + tokens // per_step if per_step and tokens else item[name]

    def _arrays(self, grid: Grid) -> dict[str, Array]:
        """What one item contributes by field, with offsets counted from its own first patch."""
        t, h, w = grid
        segments = 1 if self._merge_temporal else t
        ids = position_ids(grid, self.merge_size, temporal=self._include_temporal)
        arrays = {
            "grid_thw": np.array([(1, h, w)] * segments),
            "cu_seqlens": np.arange(1, segments + 1) * (t * h * w // segments),
            "position_ids": ids,
        }
        if self._window:
            order, lengths = windows(grid, self.merge_size, self._window)
            arrays |= {"window_index": order, "cu_window_seqlens": lengths.cumsum()}
        if self._side is not None:
            taps = combined_taps(ids, self._side, self._taps(h), self._taps(w))
            arrays["interp_indices"], arrays["interp_weights"] = taps
        return arrays

    def _axis(self, size: int) -> tuple[Array, Array]:
        return axis_taps(size, int(self._side or 0), **self._interpolation)

    def _fields(self, key: GraphKey) -> tuple[_Field, ...]:
        tokens, segments = key.token_budget, key.segment_capacity[0]
        taps = 16 if self._interpolation["mode"] == "bicubic" else 4
        shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            # One grid a segment, and one for the rows of none: some towers look it up by row.
            ("grid_thw", (segments + 1, 3), torch.int64),
            ("cu_seqlens", (segments + 1,), torch.int32),
            ("position_ids", (tokens, 3 if self._include_temporal else 2), torch.int64),
        ]
        if self._window:
            shapes.append(("window_index", (tokens // self._group,), torch.int64))
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


def _find(tower: nn.Module, name: str) -> Any | None:
    """The first value other than ``None`` of the attribute on the tower or a submodule."""
    values = (getattr(module, name, None) for module in tower.modules())
    return next((value for value in values if value is not None), None)
