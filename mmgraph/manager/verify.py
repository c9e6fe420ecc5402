"""Whether a graph may serve: how far it may be from eager mode, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmgraph.graphs import GraphBackend

__all__ = ["in_half", "largest_error", "max_error", "relative_error", "shortest"]

_FLOAT32 = 1e-3
_HALF = 0.1
_RUNS = 3
_ENOUGH = 0.2
"""Seconds of runs after which no other is made: what takes long varies little."""


def largest_error(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> float:
    """The largest relative error of a tensor, in the Frobenius norm; NaN counts where it differs.

    Tensors that hold no floating-point numbers must be equal.
    """
    return max(relative_error(a, b) for a, b in zip(ours, eager, strict=True))


def max_error(eager: Sequence[torch.Tensor]) -> float:
    """What rounding may account for: two kernels in half precision are rarely 5 % apart."""
    return _HALF if in_half(eager) else _FLOAT32


def in_half(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is in half precision."""
    return any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)


def shortest(backend: GraphBackend, run: Callable[[], Any]) -> float:
    """Seconds of the shortest of a few synchronised runs."""
    times: list[float] = []
    with backend.ordered():
        while len(times) < _RUNS and sum(times) < _ENOUGH:
            backend.synchronize()
            start = time.perf_counter()
            run()
            backend.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Error of `a` against `b` in the Frobenius norm; infinite where NaNs or shapes differ.

    Of tensors that hold no floating-point numbers it is 0 or infinite.
    """
    if a.shape != b.shape or not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
