"""Rows of pixels: images of one size, tiles, frames, and what comes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.registry.entry import Call, Draw, Inputs, Size

__all__ = ["aspect_tiles", "crops", "pixels", "tiles", "with_locals"]

Extra = Callable[[int, Draw], dict[str, Any]]
"""Given the number of items, what else a call takes."""


def pixels(
    side: int | tuple[int, int],
    *,
    name: str = "pixel_values",
    channels: int = 3,
    items: int = 2,
    extra: Extra | None = None,
) -> Inputs:
    """(B, C, H, W)."""
    height, width = (side, side) if isinstance(side, int) else side

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        call: Call = {name: draw(len(sizes), channels, height, width)}
        return call if extra is None else call | extra(len(sizes), draw)

    return Inputs("pixels", make, ((),) * items)


def tiles(
    side: int,
    count: int,
    *,
    name: str = "pixel_values",
    kind: str = "tiles",
    originals: Sequence[Size] = (),
    extra: Extra | None = None,
) -> Inputs:
    """(B, N, C, H, W); with `originals` the sizes of whole images too, which decide the tiling."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        call: Call = {name: draw(len(sizes), count, 3, side, side)}
        if originals:
            call["image_sizes"] = torch.tensor(sizes)
        return call if extra is None else call | extra(len(sizes), draw)

    return Inputs(kind, make, tuple(originals) or ((),) * 2)


def with_locals(
    side: int,
    local_side: int,
    counts: Sequence[Size],
    *,
    as_list: bool = True,
    grids: bool = False,
) -> Inputs:
    """A global view an image, and local ones: items are (number of local views,).

    With `grids` the columns and rows of local views as well, here always one row.
    """

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        numbers = [n for (n,) in sizes]
        call: Call = {
            "pixel_values": draw(len(sizes), 3, side, side),
            "pixel_values_local": draw(sum(numbers), 3, local_side, local_side),
            "num_local_patches": numbers if as_list else torch.tensor(numbers),
        }
        return call | {"patches_grid": [[n, 1] for n in numbers]} if grids else call

    return Inputs("pixels, views", make, tuple(counts))


def crops(patches: int, patch: int, pool: int) -> Inputs:
    """Crops as flat patches, with the indices that are pooled afterwards (Molmo 2)."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        rows = len(sizes) * patches
        side = int((patches // pool) ** 0.5)
        return {
            "pixel_values": draw(len(sizes), patches, 3 * patch * patch),
            "image_token_pooling": torch.arange(rows).view(-1, pool),
            "image_grids": torch.tensor([[side, side, 0, 0]] * len(sizes)),
        }

    return Inputs("crops", make, ((),) * 2)


def aspect_tiles(side: int, count: int) -> Inputs:
    """(B, 1, N, C, H, W) with aspect ratios and a mask of tiles (Llama 3.2 Vision)."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        mask = torch.zeros(len(sizes), 1, count, dtype=torch.int64)
        for row, (used, _) in zip(mask, sizes, strict=True):
            row[0, :used] = 1
        return {
            "pixel_values": draw(len(sizes), 1, count, 3, side, side),
            "aspect_ratio_ids": torch.tensor([[ratio] for _, ratio in sizes]),
            "aspect_ratio_mask": mask,
        }

    return Inputs("tiles, aspect ratios", make, ((4, 6), (2, 2)))
