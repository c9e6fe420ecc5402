"""What an encoder returned at capture, and how rows of it go back to the items they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mmgraph.errors import CaptureError, ReplayError
from mmgraph.graphs.trees import fields_of, reordered
from mmgraph.types import EncoderBatch, EncoderFacts

__all__ = ["Collector", "OutputLayout", "eager_tensors", "flatten_outputs", "record_layout"]


_FEW = 8
"""Copies up to which each is a kernel of its own: one for all takes 14 us, however small."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the output: dimension `dim` has one entry for each `divisor` tokens."""

    dim: int
    divisor: int


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """The structure of an encoder's output, recorded at capture.

    Attributes:
        leaves: One rule for each different tensor.
        slots: Index into `leaves` of each leaf of the tree, or ``None`` for a constant.
        constants: Values of the leaves that are no tensors.
        tree: The structure around the leaves.
        order: Fields of an output of transformers, in the order in which the tower gave them.
        stacked: Whether each item is one entry of the first tensor, without a dimension for that.
    """

    leaves: tuple[_Leaf, ...]
    slots: tuple[int | None, ...]
    constants: tuple[Any, ...]
    tree: Any
    order: tuple[str, ...]
    stacked: bool

    @classmethod
    def record(
        cls, output: Any, num_tokens: int, granularity: int, *, rows: bool
    ) -> tuple[OutputLayout, list[torch.Tensor]]:
        """Read the layout off an output for `num_tokens` tokens; also return its flat tensors.

        Raises:
            CaptureError: A tensor's rows can't be told apart by item.
        """
        flat, tree = pytree.tree_flatten(output)
        tensors = flatten_outputs(output)
        index = {id(tensor): i for i, tensor in enumerate(tensors)}
        leaves = tuple(_leaf(t, num_tokens, granularity, rows) for t in tensors)
        if not leaves:
            raise CaptureError("the encoder returned no tensor")
        slots = tuple(index.get(id(value)) for value in flat)
        constants = tuple(
            None if slot is not None else v for v, slot in zip(flat, slots, strict=True)
        )
        stacked = rows and tensors[0].dim() > 2
        return cls(leaves, slots, constants, tree, fields_of(output), stacked), tensors

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put flat tensors back into the encoder's own structure."""
        values = [
            constant if slot is None else tensors[slot]
            for slot, constant in zip(self.slots, self.constants, strict=True)
        ]
        built = pytree.tree_unflatten(values, self.tree)
        return reordered(built, self.order)

    def joined(self, outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Flat tensors of a call, from those of its items, each of which was called alone."""
        return [
            torch.cat(parts, leaf.dim)
            for leaf, parts in zip(self.leaves, zip(*outputs, strict=True), strict=True)
        ]

    def split(self, tensor: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor]:
        """Split the first tensor of an output by item; views, (rows, D) each."""
        leaf = self.leaves[0]
        if self.stacked:
            return list(tensor.unbind(leaf.dim))
        sizes = [item.num_tokens // leaf.divisor for item in batch.items]
        return list(torch.split(tensor, sizes, leaf.dim))


class Collector:
    """Copies outputs out of the graphs' memory into tensors that hold a whole call."""

    def __init__(self, layout: OutputLayout, batch: EncoderBatch) -> None:
        self.results: list[torch.Tensor] = []
        self._layout = layout
        self._tokens = [item.num_tokens for item in batch.items]
        self._starts = _cumulative(self._tokens)

    def add(self, items: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the outputs of `items`, whose rows lie in that order, to their places."""
        if not self.results:
            self.results = [self._empty(leaf, t) for leaf, t in self._pairs(tensors)]
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for source, target, length in _moves(items, self._tokens, self._starts):
            for (leaf, tensor), result in zip(self._pairs(tensors), self.results, strict=True):
                a, b, n = (x // leaf.divisor for x in (source, target, length))
                sources.append(_rows(tensor, leaf.dim, a, n))
                targets.append(_rows(result, leaf.dim, b, n))
        _copy(targets, sources)

    def check_owned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise if the results lie in the memory of a graph, whose next replay overwrites it.

        Raises:
            ReplayError: One does.
        """
        theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
        if any(result.untyped_storage().data_ptr() in theirs for result in self.results):
            raise ReplayError("an output lies in the memory of its graph: it has to be a copy")

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[_Leaf, torch.Tensor]]:
        return zip(self._layout.leaves, tensors, strict=True)

    def _empty(self, leaf: _Leaf, example: torch.Tensor) -> torch.Tensor:
        shape = list(example.shape)
        shape[leaf.dim] = self._starts[-1] // leaf.divisor
        return torch.empty(shape, dtype=example.dtype, device=example.device)


def eager_tensors(output: Any, facts: EncoderFacts, layout: OutputLayout) -> list[torch.Tensor]:
    """Flat tensors of what ``embed_multimodal`` returned, as a graph of `layout` gives them."""
    if facts.eager_returns == "items":
        return [(torch.stack if layout.stacked else torch.cat)(list(output))]
    return flatten_outputs(output)


def record_layout(
    output: Any, num_tokens: int, facts: EncoderFacts
) -> tuple[OutputLayout, list[torch.Tensor]]:
    """Read the layout off an output for `num_tokens` tokens; also return its flat tensors.

    Raises:
        CaptureError: A tensor's rows can't be told apart by item.
    """
    if facts.eager_returns == "items":
        output = flatten_outputs(output)[0]
    rows, granularity = facts.layout == "rows", facts.token_granularity
    return OutputLayout.record(output, num_tokens, granularity, rows=rows)


def flatten_outputs(output: Any) -> list[torch.Tensor]:
    """Return the different tensors of an output in the order in which they first occur."""
    tensors: dict[int, torch.Tensor] = {}
    for value in pytree.tree_leaves(output):
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value), value)
    return list(tensors.values())


def _leaf(tensor: torch.Tensor, num_tokens: int, granularity: int, rows: bool) -> _Leaf:
    divisors = (
        [granularity] if rows else [d for d in range(1, granularity + 1) if granularity % d == 0]
    )
    for dim in range(min(2, tensor.dim())):
        for divisor in divisors:
            if tensor.shape[dim] == num_tokens // divisor:
                return _Leaf(dim, divisor)
        if rows:
            break
    raise CaptureError(
        f"an output of shape {tuple(tensor.shape)} for {num_tokens} tokens can't be divided by item"
    )


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target."""
    if len(targets) > _FEW:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _rows(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Some rows of a tensor; without a view where they are all of them."""
    return tensor if tensor.shape[dim] == length else tensor.narrow(dim, start, length)


def _cumulative(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _moves(
    items: Sequence[int], tokens: Sequence[int], starts: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(from, to, length) in tokens; neighbours in the call are moved together."""
    moves: list[tuple[int, int, int]] = []
    source, previous = 0, -2
    for item in items:
        if item == previous + 1:
            first, target, length = moves[-1]
            moves[-1] = (first, target, length + tokens[item])
        else:
            moves.append((source, starts[item], tokens[item]))
        source += tokens[item]
        previous = item
    return moves
