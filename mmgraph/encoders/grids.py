"""What the grid of one image or video adds to the metadata of a packed tower, in closed form.

Number for number what the functions of ``transformers/vision_utils.py`` return, which take some
sixty small operations of torch for a grid; the first call with a new size would wait for them. The
tests compare them, and every graph answers its probes as the tower itself does before it serves.

Floats are computed per row and column of the grid in the order of transformers' own operations, in
float32, so that they are the same to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Grid", "axis_taps", "combined_taps", "position_ids", "windows"]

Array = npt.NDArray[Any]
Grid = tuple[int, ...]
"""(t, h, w) in patches."""

_OFFSETS = {"bilinear": np.arange(2), "bicubic": np.arange(-1, 3)}


def position_ids(grid: Grid, merge: int, *, temporal: bool) -> Array:
    """Row and column of each patch, after its frame where `temporal`: (T, 2) or (T, 3) int64.

    Patches come by merge groups of `merge` x `merge`.
    """
    t, h, w = grid
    ids = np.empty((t, h // merge, w // merge, merge, merge, 2 + temporal), np.int64)
    ids[..., -2] = np.arange(h).reshape(-1, 1, merge, 1)
    ids[..., -1] = np.arange(w).reshape(-1, 1, merge)
    if temporal:
        ids[..., 0] = np.arange(t).reshape(-1, 1, 1, 1, 1)
    return ids.reshape(t * h * w, -1)


def windows(grid: Grid, merge: int, side: int) -> tuple[Array, Array]:
    """Merge groups by windows of `side` x `side` groups, those at the edges cut.

    Returns:
        (M,) order of the groups, and the patches of each window.
    """
    t, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    down, across = np.arange(rows) // side, np.arange(columns) // side
    window = (down[:, None] * (across[-1] + 1) + across).ravel()
    order, lengths = window.argsort(kind="stable"), np.bincount(window) * merge**2
    if t > 1:
        order = (np.arange(t)[:, None] * len(order) + order).ravel()
        lengths = np.tile(lengths, t)
    return order, lengths


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


def combined_taps(
    ids: Array, side: int, rows: tuple[Array, Array], columns: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Entries of a table of `side` x `side` that each patch reads: (T, taps) int64 and float32.

    Args:
        ids: Row and column of each patch, the last two of each row.
        side: Of the table.
        rows: Taps and weights by row, of :func:`axis_taps`.
        columns: Those by column.
    """
    taps, row, column = rows[0].shape[1], ids[:, -2], ids[:, -1]
    down, by_row = (axis.repeat(taps, axis=1).take(row, axis=0) for axis in rows)
    across, by_column = (
        np.concatenate([axis] * taps, axis=1).take(column, axis=0) for axis in columns
    )
    return down * side + across, by_row * by_column
