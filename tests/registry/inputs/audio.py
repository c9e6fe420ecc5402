"""Audio: mel frames or samples; items are (frames,) that are real, or () where all are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from tests.registry.entry import Call, Draw, Inputs, Size

__all__ = ["chunks", "clips", "windows"]

Order = Literal["bins, frames", "frames, bins", "samples"]


def windows(
    *shape: int, name: str = "input_features", items: int = 2, kind: str = "mel windows"
) -> Inputs:
    """(B, ...shape), all of one length."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        return {name: draw(len(sizes), *shape)}

    return Inputs(kind, make, ((),) * items)


def clips(
    lengths: Sequence[int],
    order: Order,
    *,
    mask: str,
    bins: int = 0,
    name: str = "input_features",
    dtype: torch.dtype = torch.int64,
    kind: str = "mel, mask",
) -> Inputs:
    """Clips padded to the longest of `lengths`, and a mask (B, F) of what is real."""
    length = max(lengths)

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        shapes = {
            "bins, frames": (bins, length),
            "frames, bins": (length, bins),
            "samples": (length,),
        }
        real = torch.arange(length) < torch.tensor(sizes)
        return {name: draw(len(sizes), *shapes[order]), mask: real.to(dtype)}

    return Inputs(kind, make, tuple((n,) for n in lengths))


def chunks(bins: int, frames: int, samples: Sequence[int]) -> Inputs:
    """Mel chunks of one length, and how many samples of the waveform each stands for."""

    def make(model: nn.Module, sizes: Sequence[Size], draw: Draw) -> Call:
        return {
            "input_features": draw(len(sizes), bins, frames),
            "chunk_sample_lengths": torch.tensor([n for (n,) in sizes]),
        }

    return Inputs("packed mel, lengths", make, tuple((n,) for n in samples))
