"""Random inputs of towers; the user's generators stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["fractions", "normal"]


def normal(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Numbers of the standard normal distribution."""
    generator = _generator(device, seed)
    return torch.randn(*shape, generator=generator, device=generator.device).to(device, dtype)


def fractions(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Numbers in [0, 1), which are 0 for a tower that takes them for integers."""
    generator = _generator(device, seed)
    numbers = torch.rand(*shape, generator=generator, device=generator.device)
    return (numbers * 0.99).to(device, dtype)  # below 1 in half precision too


def _generator(device: torch.device, seed: int) -> torch.Generator:
    """On `device`, or on the CPU for a model without memory."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
