"""Patches of images and videos of any size: packed end to end, or padded to a length.

Items are (t, h, w) in patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.registry.entry import Call, Draw, Inputs, Size

__all__ = [
    "IMAGES",
    "VIDEOS",
    "canvas",
    "coordinates",
    "mask_of",
    "naflex",
    "packed",
    "padded",
    "padded_positions",
    "strip",
]

IMAGES: tuple[Size, ...] = ((1, 4, 6), (1, 8, 4))
VIDEOS: tuple[Size, ...] = ((2, 4, 6), (3, 4, 4))


def packed(
    *patch: int,
    sizes: tuple[Size, ...] = IMAGES,
    names: tuple[str, str] = ("pixel_values", "image_grid_thw"),
    extra: Callable[[Sequence[Size]], dict[str, Any]] | None = None,
) -> Inputs:
    """(T, ...patch) and (B, 3) grids."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        call: Call = {
            names[0]: draw(sum(map(math.prod, sizes)), *patch),
            names[1]: torch.tensor(sizes),
        }
        return call if extra is None else call | extra(sizes)

    return Inputs("packed patches", make, sizes)


def strip(patch: int, sizes: tuple[Size, ...]) -> Inputs:
    """(1, 3, P, T * P), all patches side by side, and (B, 2) sizes in patches."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        total = sum(map(math.prod, sizes))
        return {
            "pixel_values": draw(1, 3, patch, total * patch),
            "target_sizes": torch.tensor([size[1:] for size in sizes]),
        }

    return Inputs("packed patches, sizes", make, sizes)


def canvas(patch: int, sizes: tuple[Size, ...] = ((1, 8, 12), (1, 4, 6))) -> Inputs:
    """(B, 3, H, W) as large as the largest image, and (B, 2) sizes in pixels (Pixtral)."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        pixel_sizes = [(h * patch, w * patch) for _, h, w in sizes]
        height, width = (max(side) for side in zip(*pixel_sizes, strict=True))
        return {
            "pixel_values": draw(len(sizes), 3, height, width),
            "image_sizes": torch.tensor(pixel_sizes),
        }

    return Inputs("pixels, sizes", make, sizes)


def padded(patch: int, length: int, sizes: tuple[Size, ...] = IMAGES) -> Inputs:
    """(B, N, 3 * P * P), a mask and (B, 2) sizes in patches (SigLIP 2)."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        return {
            "pixel_values": draw(len(sizes), length, 3 * patch * patch),
            "pixel_attention_mask": mask_of(sizes, length).int(),
            "spatial_shapes": torch.tensor([size[1:] for size in sizes]),
        }

    return Inputs("padded patches", make, sizes)


def padded_positions(
    patch: int, length: int, sizes: tuple[Size, ...], names: tuple[str, str]
) -> Inputs:
    """(B, N, 3 * P * P) from 0 to 1, and positions (B, N, 2), -1 where there is none (Gemma 4)."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        positions = torch.full((len(sizes), length, 2), -1)
        for row, (_, h, w) in zip(positions, sizes, strict=True):
            row[: h * w] = coordinates(h, w).flip(-1)
        contents = draw(len(sizes), length, 3 * patch * patch).sigmoid()
        return {names[0]: contents, names[1]: positions}

    return Inputs("padded patches, positions", make, sizes)


def naflex(patch: int, length: int, sizes: tuple[Size, ...] = ((1, 8, 8), (1, 4, 6))) -> Inputs:
    """timm's: (B, N, P * P * 3), coordinates (B, N, 2) and a mask."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        places = torch.zeros(len(sizes), length, 2, dtype=torch.int64)
        for row, (_, h, w) in zip(places, sizes, strict=True):
            row[: h * w] = coordinates(h, w)
        return {
            "patches": draw(len(sizes), length, patch * patch * 3),
            "patch_coord": places,
            "patch_valid": mask_of(sizes, length),
        }

    return Inputs("padded patches, positions", make, sizes)


def mask_of(sizes: Sequence[Size], length: int) -> torch.Tensor:
    """(B, N), true where an item has a patch."""
    used = torch.tensor([math.prod(size) for size in sizes])
    return torch.arange(length) < used[:, None]


def coordinates(height: int, width: int) -> torch.Tensor:
    """(H * W, 2) row and column of each patch."""
    return torch.cartesian_prod(torch.arange(height), torch.arange(width))
