"""Flat patches with their row and column in front of the numbers of each (Pix2Struct)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from tests.registry.entry import Call, Draw, Inputs, Size
from tests.registry.inputs.patches import IMAGES, coordinates, mask_of

__all__ = ["flattened"]


def flattened(
    patch: int, length: int, *, mask: bool = False, sizes: tuple[Size, ...] = IMAGES
) -> Inputs:
    """(B, N, 2 + 3 * P * P), zero beyond an item's own patches."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        patches = draw(len(sizes), length, 2 + 3 * patch * patch)
        patches[..., :2] = 0
        for row, (_, h, w) in zip(patches, sizes, strict=True):
            row[: h * w, :2] = coordinates(h, w) + 1.0
            row[math.prod((h, w)) :] = 0
        call: Call = {"flattened_patches": patches}
        return call | {"attention_mask": mask_of(sizes, length).to(torch.float32)} if mask else call

    return Inputs("padded patches", make, sizes, may_be_nan=False)
