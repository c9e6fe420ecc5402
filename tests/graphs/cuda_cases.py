"""Callables for graphs, and whether a graph does what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mmgraph.graphs.backend import CapturedGraph

Buffers = Mapping[str, torch.Tensor]


def affine(factor: float) -> Callable[[Buffers], list[torch.Tensor]]:
    """Elementwise, so that a replay is exactly the call; uses memory between input and output."""
    return lambda buffers: [((buffers["x"] * factor).sin() + 1).cos()]


def assert_follows(graph: CapturedGraph, x: torch.Tensor, factor: float) -> None:
    x.normal_()
    assert torch.equal(graph.replay()[0], affine(factor)({"x": x})[0])
