"""The work that no way of running a tower can avoid: its matrix products and its attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

__all__ = ["Attention", "Matmul", "Operation", "Product", "Workload"]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Products of one input with the weights of one or more layers.

    Attributes:
        rows: M, rows of the input.
        weights: (N, K) each, the layers' own.
    """

    rows: int
    weights: tuple[torch.Tensor, ...]

    @property
    def flops(self) -> int:
        return 2 * self.rows * sum(weight.numel() for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Matmul:
    """A product of two tensors neither of which is a weight: (..., M, K) and (..., K, N)."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        batch = torch.broadcast_shapes(self.left[:-2], self.right[:-2])
        return 2 * math.prod(batch) * self.left[-2] * self.left[-1] * self.right[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attention within segments.

    Attributes:
        queries: Rows of each segment.
        keys: Rows of each segment that they attend to.
        heads: Of the queries.
        key_heads: Of keys and values.
        head_dim: Of queries and keys.
        value_dim: Of values.
        dtype: Of all of them.
        scale: Factor of the logits; 1/sqrt(head_dim) if ``None``.
        mask: Shape and dtype of a mask, if there is one.
        causal: Whether a row attends to those before it only.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float | None = None
    mask: tuple[tuple[int, ...], torch.dtype] | None = None
    causal: bool = False

    @property
    def flops(self) -> int:
        """Of the two products; a mask, causal or not, saves nothing."""
        pairs = sum(q * k for q, k in zip(self.queries, self.keys, strict=True))
        return 2 * pairs * self.heads * (self.head_dim + self.value_dim)

    def joined(self, other: Attention) -> Attention | None:
        """Both as one over the segments of both, or ``None`` if they are of different kinds."""
        both = replace(self, queries=other.queries, keys=other.keys)
        if both != other or self.mask is not None or self.causal:
            return None
        return replace(self, queries=self.queries + other.queries, keys=self.keys + other.keys)


Operation = Product | Matmul | Attention


@dataclass(frozen=True, slots=True)
class Workload:
    """The operations of one call, in order."""

    operations: tuple[Operation, ...]

    @property
    def products(self) -> list[Product | Matmul]:
        """All but attention."""
        return [op for op in self.operations if not isinstance(op, Attention)]

    @property
    def attention(self) -> list[Attention]:
        """Attention only."""
        return [op for op in self.operations if isinstance(op, Attention)]
