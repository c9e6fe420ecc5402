"""Comparing what graphs give with what eager mode gives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

__all__ = ["assert_as_exact", "assert_same_output"]


def assert_same_output(ours: Any, eager: Any) -> None:
    """The same types and shapes, and float32 values within the bound of docs/design.md.

    On a GPU kernels may be others (blocks are compiled), so the order of sums is another.
    """
    (a, ours_tree), (b, eager_tree) = tree_flatten(ours), tree_flatten(eager)
    assert ours_tree == eager_tree
    assert type(ours) is type(eager)
    for x, y in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            assert error(x, y) <= (1e-4 if y.is_cuda else 1e-5)
        else:
            assert x == y


def assert_as_exact(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    """In half precision: as close to float32 as eager mode is, but for chance."""
    slack = 1.10 + 4 / truth.numel() ** 0.5
    assert ours.dtype == eager.dtype != truth.dtype
    assert error(ours, truth) <= slack * error(eager, truth)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative error of `a` in the Frobenius norm."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
