"""The tower of these tests: a few blocks of one make, each added to what it reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["Tower"]


class Tower(nn.Module):
    """Three blocks of `make`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x
