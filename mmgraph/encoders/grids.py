"""What the grid of one image or video adds to the metadata of a packed tower, in closed form.

Number for number what the functions of ``transformers/vision_utils.py`` return, which take some
sixty small operations of torch for a grid; the first call with a new size would wait for them. The
tests compare them, and every graph answers its probes as the tower itself does before it serves.

Each array is one operation on a table that depends on the height alone and one that depends on the
width alone. Heights and widths come again where grids don't, so tables are kept, and those of usual
ones are made beforehand (``prepare``). What is left to do for a new grid is written to where it is
to be.

Floats are computed per row and column of the grid in the order of transformers' own operations, in
float32, so that they are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Grid", "GridArrays", "axis_taps"]

Array = npt.NDArray[Any]
Grid = tuple[int, ...]
"""(t, h, w) in patches."""

_OFFSETS = {"bilinear": np.arange(2), "bicubic": np.arange(-1, 3)}
_CACHED_SIZES = 256
_ELONGATED = 2
"""Times the side of a square of as many patches, what usual images are long at most (4 to 1)."""


class GridArrays:
    """Computes the arrays of grids; patches come by merge groups of `merge` x `merge`.

    Args:
        merge: Side of a merge group in patches.
        window: Side of an attention window in merge groups; 0 without windows.
        temporal: Whether positions hold the frame, before row and column.
        merge_temporal: Whether the frames of a video attend to each other.
        side: Of the table that positions are read from; ``None`` without one.
        interpolation: How it is read, see :func:`axis_taps`.

    Attributes:
        columns: Shape of an entry and dtype by the name of an array.
        are_known: Whether arrays can be computed: not in a mode of interpolation that isn't known.
    """

    def __init__(
        self,
        merge: int,
        *,
        window: int = 0,
        temporal: bool = False,
        merge_temporal: bool = False,
        side: int | None = None,
        interpolation: Mapping[str, Any] | None = None,
    ) -> None:
        self._merge, self._group, self._window = merge, merge**2, window
        self._temporal, self._merge_temporal = temporal, merge_temporal
        self._side, self._interpolation = side, dict(interpolation or {})
        self.are_known = True
        self.columns: dict[str, tuple[tuple[int, ...], Any]] = {
            "grid_thw": ((3,), np.int64),
            "cu_seqlens": ((), np.int32),
            "position_ids": ((2 + temporal,), np.int64),
        }
        if window:
            self.columns |= {"window_index": ((), np.int64), "cu_window_seqlens": ((), np.int32)}
        if side is not None:
            taps = len(_OFFSETS.get(self._interpolation["mode"], ())) ** 2
            self.are_known = taps > 0
            self.columns["interp_indices"] = ((taps,), np.int64)
            self.columns["interp_weights"] = ((taps,), np.float32)
        self._down = lru_cache(maxsize=_CACHED_SIZES)(self._by_row)
        self._across = lru_cache(maxsize=_CACHED_SIZES)(self._by_column)
        self._taps = lru_cache(maxsize=_CACHED_SIZES)(self._axis_taps)
        self._many_rows = lru_cache(self._rows_of)
        self._many_columns = lru_cache(self._columns_of)
        self._prepared = 0

    def lengths(self, grid: Grid) -> dict[str, int]:
        """Entries of each array, the leading 0 of cumulative ones left out."""
        t, h, w = grid
        tokens, segments = t * h * w, 1 if self._merge_temporal else t
        lengths = {"grid_thw": segments, "cu_seqlens": segments, "position_ids": tokens}
        if self._window:
            span = self._merge * self._window
            lengths["window_index"] = tokens // self._group
            lengths["cu_window_seqlens"] = t * -(-h // span) * -(-w // span)
        if self._side is not None:
            lengths["interp_indices"] = lengths["interp_weights"] = tokens
        return lengths

    def prepare(self, tokens: int) -> None:
        """Make the tables for images of up to `tokens` patches, as far as these are of usual shape.

        A new height or width takes twice as long as the rest of a new grid.
        """
        longest = min(int(_ELONGATED * tokens**0.5), _CACHED_SIZES // 2 * self._merge)
        for size in range(self._prepared + self._merge, longest + 1, self._merge):
            self._down(size)
            self._across(size)
            self._prepared = size

    def arrays(self, grid: Grid) -> dict[str, Array]:
        """The arrays of `grid`, with offsets counted from its own first patch."""
        lengths = self.lengths(grid)
        out = {n: np.empty((lengths[n], *shape), kind) for n, (shape, kind) in self.columns.items()}
        self.write(grid, out)
        return out

    def write(self, grid: Grid, out: Mapping[str, Array]) -> None:
        """Write the arrays of `grid` into those of `out`, which have its lengths."""
        t, h, w = grid
        down, across, frame = self._down(h), self._across(w), h * w
        out["grid_thw"][:] = (1, h, w)
        step = t * frame if self._merge_temporal else frame
        out["cu_seqlens"][:] = np.arange(step, t * frame + 1, step) if t > 1 else step
        by_group = (t, h // self._merge, w // self._merge, -1)
        ids = out["position_ids"].reshape(by_group)
        np.add(down["position_ids"], across["position_ids"], out=ids)
        if self._temporal and t > 1:
            out["position_ids"].reshape(t, frame, -1)[:, :, 0] = np.arange(t)[:, None]
        if self._window:
            order, groups = out["window_index"], frame // self._group
            order[(down["windows"] @ across["windows"]).ravel()] = np.arange(groups)
            ends, of_frame = out["cu_window_seqlens"], (down["window_ends"] @ across["window_ends"])
            ends[: of_frame.size] = of_frame.ravel()
            if t > 1:
                _repeat(order, t, groups)
                _repeat(ends, t, frame)
        if self._side is not None:
            for name, combine in (("interp_indices", np.add), ("interp_weights", np.multiply)):
                combine(down[name], across[name], out=out[name].reshape(by_group))

    def _by_row(self, size: int) -> dict[str, Array]:
        """What is the same along rows: tables of a grid that is `size` patches high."""
        groups = size // self._merge
        positions, windows = self._many_rows(_power_of_two(groups))
        tables = {"position_ids": positions[:groups]}
        if self._window:
            tables["windows"] = windows = windows[:groups].copy()
            windows[_last(groups, self._window) :, 1] = groups - _last(groups, self._window)
            tables["window_ends"] = windows[:: self._window, :2]
        if self._side is not None:
            places, weights = self._taps(size)
            taps = places.shape[1]
            tables["interp_indices"] = self._down_groups(places.repeat(taps, axis=1) * self._side)
            tables["interp_weights"] = self._down_groups(weights.repeat(taps, axis=1))
        return tables

    def _by_column(self, size: int) -> dict[str, Array]:
        """What is the same along columns: tables of a grid that is `size` patches wide."""
        groups = size // self._merge
        positions, windows, ends = self._many_columns(_power_of_two(groups))
        tables = {"position_ids": positions[:groups]}
        if self._window:
            last = _last(groups, self._window)
            tables["windows"] = windows = windows[:, :groups].copy()
            windows[0], windows[2, last:] = groups, groups - last
            tables["window_ends"] = ends = ends[:, : last // self._window + 1].copy()
            ends[0] = ends[1, -1] = groups * self._group
        if self._side is not None:
            places, weights = self._taps(size)
            times = (1, places.shape[1])
            tables["interp_indices"] = self._across_groups(np.tile(places, times))
            tables["interp_weights"] = self._across_groups(np.tile(weights, times))
        return tables

    def _axis_taps(self, size: int) -> tuple[Array, Array]:
        return axis_taps(size, self._side or 0, **self._interpolation)

    def _rows_of(self, groups: int) -> tuple[Array, Array]:
        """Positions, and tables of windows that are all whole, of `groups` merge groups."""
        ids = np.zeros((groups * self._merge, 2 + self._temporal), np.int64)
        ids[:, -2] = np.arange(len(ids))
        index, side = np.arange(groups), self._window or 1
        windows = [index // side * side, np.full(groups, side), index % side, np.ones_like(index)]
        return self._down_groups(ids), np.stack(windows, axis=1)

    def _columns_of(self, groups: int) -> tuple[Array, Array, Array]:
        """Positions, and tables of windows that are all whole, of `groups` merge groups.

        A merge group comes after the windows above, those to the left, and in its own one after
        the rows above and those to the left.
        """
        ids = np.zeros((groups * self._merge, 2 + self._temporal), np.int64)
        ids[:, -1] = np.arange(len(ids))
        index, side = np.arange(groups), self._window or 1
        windows = [index, index // side * side, np.full(groups, side), index % side]
        ends = [index[::side], (index[::side] + side) * self._group]
        return self._across_groups(ids), np.stack(windows), np.stack(ends)

    def _down_groups(self, rows: Array) -> Array:
        """Entries by row, repeated for each column of a group: (h / merge, 1, all of a group)."""
        m = self._merge
        return (
            rows.reshape(-1, m, 1, rows.shape[1]).repeat(m, axis=2).reshape(len(rows) // m, 1, -1)
        )

    def _across_groups(self, columns: Array) -> Array:
        """Entries by column, repeated for each row of a group: (w / merge, all of a group)."""
        m = self._merge
        return (
            columns.reshape(-1, 1, m, columns.shape[1])
            .repeat(m, axis=1)
            .reshape(len(columns) // m, -1)
        )


def _repeat(values: Array, times: int, step: int) -> None:
    """Fill `values` with what its first of `times` parts holds, `step` more in each part."""
    parts = values.reshape(times, -1)
    parts[1:] = parts[0] + np.arange(step, times * step, step)[:, None]


def _last(groups: int, side: int) -> int:
    """Where the last window of `groups` merge groups in a row starts."""
    return (groups - 1) // side * side


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def axis_taps(
    size: int, side: int, *, mode: str, padding: str, align_corners: bool
) -> tuple[Array, Array]:
    """Where an axis of `size` patches reads a table of `side` entries: (size, taps) each.

    Raises:
        ValueError: The mode is neither "bilinear" nor "bicubic".
    """
    if mode not in _OFFSETS:
        raise ValueError(f"positions are interpolated in mode {mode!r}: bilinear or bicubic only")
    index, offsets = np.arange(size, dtype=np.float32), _OFFSETS[mode]
    if align_corners:
        source = index * (side - 1) / max(size - 1, 1)
    else:
        source = (index + 0.5) * side / size - 0.5
    floor = np.floor(source)
    taps = floor.astype(np.int64)[:, None] + offsets
    distance = np.abs((source - floor)[:, None] - offsets.astype(np.float32))
    if mode == "bilinear":
        weights = np.maximum(1 - distance, 0)
    else:
        near = (1.25 * distance - 2.25) * distance * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weights = np.where(distance <= 1, near, far)
    if padding == "zeros":
        weights = weights * ((taps >= 0) & (taps < side))
    return np.minimum(np.maximum(taps, 0), side - 1), weights
