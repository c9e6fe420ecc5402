"""The tanh approximation of GELU as the last step of the matrix product before it.

cuBLAS can apply it to its accumulators on the way out. On an H200 that takes Qwen3-VL's first MLP
layer and its activation from 25 to 17 us at 784 tokens, and from 184 to 109 us at 7,056; and it is
closer to the exact numbers, since what GELU reads isn't rounded to 16 bits first. The exact GELU
(erf) has no such step (see ``gelu.py``).

Which layer feeds which activation isn't written anywhere. It is tried out: where a module gives the
same result with the step moved, and its activation is called once, the step moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from mmgraph.ops import linear_gelu
from mmgraph.preparation.storage import is_plain_linear

__all__ = ["FusedActivations"]

_ROWS = 16
_MAX_CHILDREN = 8


class GeluLinear(nn.Linear):
    """A linear layer that applies the activation after it, for the time of a capture.

    A class rather than a function on the instance: compilers share code between layers of a class.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_gelu(x, self.weight, self.bias)


class Unchanged(nn.Module):
    """An activation whose work is done already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Pair(NamedTuple):
    linear: nn.Linear
    activation: nn.Module
    parent: nn.Module
    children: tuple[nn.Module, ...]

    @property
    def is_as_found(self) -> bool:
        """Whether the layer still feeds the activation: an adapter may have come between them."""
        return tuple(self.parent.children()) == self.children


class FusedActivations:
    """The layers of a tower that can apply the activation after them.

    Args:
        module: The tower. It is as it was except within :meth:`applied`.
        others: Layers to leave alone.
    """

    def __init__(self, module: nn.Module, others: Collection[nn.Module] = ()) -> None:
        self._pairs = [
            pair
            for parent in module.modules()
            for pair in _candidates(parent)
            if pair.linear not in others and _is_right(parent, pair)
        ]
        self._classes = {pair.activation: type(pair.activation) for pair in self._pairs}

    def __len__(self) -> int:
        return len(self._pairs)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the layers apply the activation, and the activation does nothing."""
        pairs = [
            p
            for p in self._pairs
            if is_plain_linear(p.linear)
            and p.linear.bias is not None
            and type(p.activation) is self._classes[p.activation]
            and "forward" not in p.activation.__dict__
            and p.is_as_found
        ]
        with _applied(pairs):
            yield


@contextmanager
def _applied(pairs: Sequence[_Pair]) -> Iterator[None]:
    classes = {pair.activation: type(pair.activation) for pair in pairs}
    try:
        for pair in pairs:
            pair.linear.__class__, pair.activation.__class__ = GeluLinear, Unchanged
        yield
    finally:
        for pair in pairs:
            pair.linear.__class__ = nn.Linear
            pair.activation.__class__ = classes[pair.activation]


def _candidates(parent: nn.Module) -> list[_Pair]:
    """Each layer of an MLP with its only activation."""
    children = list(parent.children())
    activations = [child for child in children if _is_tanh_gelu(child)]
    if len(activations) != 1 or len(children) > _MAX_CHILDREN or parent.training:
        return []
    if any(m._forward_hooks or m._forward_pre_hooks for m in (parent, *children)):
        return []  # they would see what is tried out
    layers = [c for c in children if is_plain_linear(c) and c.bias is not None]
    return [_Pair(layer, activations[0], parent, tuple(children)) for layer in layers]


def _is_tanh_gelu(module: nn.Module) -> bool:
    """Whether a module is the tanh approximation, by what it does to numbers."""
    if "gelu" not in type(module).__name__.lower() or any(True for _ in module.parameters()):
        return False
    x = torch.linspace(-4, 4, 65, dtype=torch.float64)
    try:
        output = module.forward(x)
    except Exception:  # it takes something else
        return False
    return isinstance(output, torch.Tensor) and torch.allclose(
        output, F.gelu(x, approximate="tanh"), rtol=0, atol=1e-9
    )


@torch.no_grad()
def _is_right(parent: nn.Module, pair: _Pair) -> bool:
    """Whether the activation reads what the layer gives, and nobody else does."""
    weight = pair.linear.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _ROWS, weight.shape[1], generator=generator).to(weight)
    try:
        expected = parent.forward(rows)
        with _applied([pair]):
            output = parent.forward(rows)
    except Exception:  # it takes other arguments
        return False
    return isinstance(expected, torch.Tensor) and _close(expected, output)


def _close(expected: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether two results differ by rounding: a GELU too many or too few changes them by a lot."""
    if expected.shape != output.shape:
        return False
    a, b = expected.double(), output.double()
    return float((a - b).norm()) <= 0.02 * float(a.norm())
