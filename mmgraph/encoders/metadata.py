"""Metadata of packed towers: every data-dependent tensor, from the grids as Python ints.

Towers of transformers take these tensors from their keyword arguments instead of computing them
(``transformers/vision_utils.py``); which of them a tower wants shows in its attributes, as in
``transformers/exporters/utils.py``. A call's metadata is what each of its grids adds
(``grids.py``), shifted and laid end to end in one block of bytes, so that an upload is one copy.

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

from mmgraph.encoders.grids import Array, Grid, GridArrays
from mmgraph.types import EncoderItemSpec, GraphKey

__all__ = ["Grid", "PackedMetadata"]

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 16
_CACHED_GRIDS = 256
_CUMULATIVE = ("cu_seqlens", "cu_window_seqlens")
"""One for each kind of attention."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    stop: int

    def of(self, block: Bytes) -> Array:
        """The field as a view of `block`."""
        return np.ndarray(self.shape, self.dtype, block, self.start)


_TORCH = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}


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
        side = _find(tower, "num_grid_per_side")
        self._grids = GridArrays(
            self.merge_size,
            window=self._window,
            temporal=bool(getattr(tower, "include_temporal", _find(tower, "axis_dim") is not None)),
            merge_temporal=bool(getattr(tower, "merge_temporal", False)),
            side=None if side is None else int(side),
            interpolation={
                "mode": _find(tower, "interpolation_mode") or "bilinear",
                "padding": _find(tower, "interpolation_padding") or "border",
                "align_corners": _find(tower, "interpolation_align_corners") is True,
            },
        )
        self._smallest = np.array((1, self.merge_size, self.merge_size))
        self.arrays = lru_cache(maxsize=_CACHED_GRIDS)(self._grids.arrays)
        self.item = lru_cache(maxsize=4096)(self._item)
        self._layout = lru_cache(maxsize=256)(self._fields)
        self._is_by_frame = lru_cache(maxsize=4096)(self._compare_with_frames)

    def num_bytes(self, key: GraphKey) -> int:
        """Size of the block of `key` in bytes."""
        return self._layout(key)[-1].stop

    def fill(self, block: Bytes, grids: tuple[Grid, ...], key: GraphKey) -> None:
        """Write the metadata of `grids` into `block`, which has `num_bytes(key)` bytes."""
        fields = {field.name: field.of(block) for field in self._layout(key)}
        for name in _CUMULATIVE[: len(key.segment_capacity)]:
            fields[name][0], fields[name] = 0, fields[name][1:]
        if len(grids) == 1:  # written to where it is to be: most calls of a new size
            stops = self._grids.lengths(grids[0])
            self._grids.write(grids[0], {n: out[: stops[n]] for n, out in fields.items()})
        else:
            stops = self._lay_out(grids, fields)
        tokens = sum([t * h * w for t, h, w in grids])
        rest = {"grid_thw": self._smallest, **dict.fromkeys(_CUMULATIVE, tokens)}
        for name, out in fields.items():
            stop, size = stops[name], len(out)
            if stop < size:
                is_order = name == "window_index"
                out[stop:] = np.arange(stop, size) if is_order else rest.get(name, 0)

    def _lay_out(self, grids: tuple[Grid, ...], fields: Mapping[str, Array]) -> dict[str, int]:
        """Write the arrays of `grids` end to end into `fields`; where they end."""
        items = [self.arrays(grid) for grid in grids]
        tokens = list(accumulate([t * h * w for t, h, w in grids], initial=0))
        stops = dict.fromkeys(fields, 0)
        for name, out in fields.items():
            for item, before in zip(items, tokens, strict=False):
                start, stops[name] = stops[name], stops[name] + len(item[name])
                out[start : stops[name]] = self._shifted(name, item, before)
        return stops

    def prepare(self, tokens: int) -> None:
        """Make what new grids of up to `tokens` patches have in common."""
        self._grids.prepare(tokens)

    def example(self, key: GraphKey) -> Bytes:
        """A block that is valid for `key`: single merge groups as far as the tables reach."""
        block = np.zeros(self.num_bytes(key), dtype=np.uint8)
        count = min(key.token_budget // self._group, *key.segment_capacity)
        self.fill(block, ((1, self.merge_size, self.merge_size),) * max(1, count), key)
        return block

    def kwargs(self, block: torch.Tensor, key: GraphKey) -> dict[str, Any]:
        """The tower's keyword arguments as views of the block on its device."""
        kwargs: dict[str, Any] = {
            f.name: block[f.start : f.stop].view(_TORCH[f.dtype.type]).view(f.shape)
            for f in self._layout(key)
        }
        kwargs["max_seqlen"] = key.max_seqlen[0]
        if self._window:
            kwargs["max_window_seqlen"] = key.max_seqlen[1]
        return kwargs

    def _item(self, grid: Grid) -> EncoderItemSpec | None:
        """The planner's view of a grid, or ``None`` if no image can have it."""
        if len(grid) != 3 or min(grid) < 1 or any(side % self.merge_size for side in grid[1:]):
            return None
        t, h, w = grid
        lengths = self._grids.lengths(grid)
        counts = [lengths[name] for name in _CUMULATIVE if name in lengths]
        longest = [t * h * w // counts[0], self._window**2 * self._group]
        return EncoderItemSpec(t * h * w, tuple(counts), tuple(longest[: len(counts)]), grid)

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
        if not self._grids.are_known:
            return False
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

    def _fields(self, key: GraphKey) -> tuple[_Field, ...]:
        tokens, segments = key.token_budget, key.segment_capacity
        sizes = {
            # One grid a segment, and one for the rows of none: some towers look it up by row.
            "grid_thw": segments[0] + 1,
            **{name: size + 1 for name, size in zip(_CUMULATIVE, segments, strict=False)},
            "window_index": tokens // self._group,
        }
        fields, start = [], 0
        for name, (columns, kind) in self._grids.columns.items():
            shape, dtype = (sizes.get(name, tokens), *columns), np.dtype(kind)
            stop = start + int(np.prod(shape)) * dtype.itemsize
            fields.append(_Field(name, shape, dtype, start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return tuple(fields)


def _find(tower: nn.Module, name: str) -> Any | None:
    """The first value other than ``None`` of the attribute on the tower or a submodule."""
    values = (getattr(module, name, None) for module in tower.modules())
    return next((value for value in values if value is not None), None)
