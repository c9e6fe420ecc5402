"""Contents of exact calls: copies of them, and others like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["copied", "varied"]


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with tensors of their own, which nobody else reads or changes."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Other contents of the same kind: zeros stay zero, masks and places change their order.

    What was light comes out dark: a tower that treats them in two ways while it runs in eager
    mode, and in one while it is recorded, must not pass with both probes on the same side.
    """
    flipped = tensor.flip(0) if tensor.dim() else tensor
    if not tensor.dtype.is_floating_point:
        return flipped
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(1)
    factor = torch.rand(tensor.shape, generator=generator, device=tensor.device) + 0.5
    return torch.where(_whole_columns(tensor), flipped, tensor * -factor.to(tensor.dtype))


def _whole_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Which columns may be a mask, or places to look something up: theirs are whole numbers."""
    whole = ~tensor.isfinite() | (tensor == tensor.round())
    return whole.flatten(0, -2).all(0) if tensor.dim() > 1 else whole
