"""Comparing ways to compute the same thing: how long each takes, and whether they agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_off", "milliseconds"]

_ROUNDING = 0.02
_RUNS = 5
_CYCLES_A_SECOND = 2e9
_LEAST_SPIN_S, _MOST_SPIN_S = 1e-3, 0.1


def milliseconds(run: Callable[[], Any]) -> float:
    """Time `run` on the current CUDA device, without the host's part.

    Launches are queued behind a kernel that spins for longer than the host needs for them: some
    packages take a tenth of a millisecond and more to launch what runs for less.
    """
    run()  # kernels are compiled and plans are made at the first call
    torch.cuda.current_stream().synchronize()  # not the device: others may be recording there
    launching = time.perf_counter()
    run()
    launching = time.perf_counter() - launching
    spin_s = min(max(_LEAST_SPIN_S, 2 * _RUNS * launching), _MOST_SPIN_S)
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(spin_s * _CYCLES_A_SECOND))
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _RUNS)
    return min(times)


def is_off(output: torch.Tensor, expected: torch.Tensor, *, each_row: bool = False) -> bool:
    """Whether more than rounding lies between two results; what isn't finite there says nothing.

    Args:
        output: What is judged.
        expected: What it should be.
        each_row: Whether none of the rows may be off, along the last dimension.
    """
    known = expected.isfinite()
    exact = expected.float().where(known, 0.0)
    difference = (output.float() - exact).where(known, 0.0)
    dims = -1 if each_row else tuple(range(exact.dim()))
    error, size = (torch.linalg.vector_norm(x, dim=dims) for x in (difference, exact))
    return not bool((error <= _ROUNDING * size).all())
