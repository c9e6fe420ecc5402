"""Comparing ways to compute the same thing: how long each takes, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_off", "milliseconds"]

_ROUNDING = 0.02
_RUNS = 5
_SPIN_CYCLES = 2_000_000  # a millisecond, in which the host gets ahead of the device


def milliseconds(run: Callable[[], Any]) -> float:
    """Time `run` on the current CUDA device: launches are queued behind a spinning kernel."""
    run()  # kernels are compiled and plans are made at the first call
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _RUNS)
    return min(times)


def is_off(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether more than rounding lies between two results; what isn't finite there says nothing."""
    known = expected.isfinite()
    exact = expected.float().where(known, 0.0)
    difference = (output.float() - exact).where(known, 0.0)
    return not bool(difference.norm() <= _ROUNDING * exact.norm())
