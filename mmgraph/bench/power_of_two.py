"""Plain graphs with budgets that are powers of two, as serving engines capture encoders.

A graph for each budget, made by hand with what it bakes in at its worst: one segment as long as the
budget, and a table for as many of the smallest images as fit. The items of a call are sorted and
put together as far as the largest budget goes; each batch runs in the smallest one that holds it.
Metadata is computed beforehand, so that a call is copies in, replays, and copies out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mmgraph.bench.handmade import captured, precomputed_metadata
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call
from mmgraph.encoders import PackedEncoder
from mmgraph.manager.outputs import flatten_outputs
from mmgraph.modules import use_attention_implementation
from mmgraph.ops import VARLEN_ATTENTION
from mmgraph.types import GraphKey

__all__ = ["Batch", "fill", "power_of_two_budgets", "power_of_two_call"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that one replay serves.

    Attributes:
        items: Indices of the items, by ascending size.
        budget: The smallest budget that holds them.
    """

    items: tuple[int, ...]
    budget: int


def power_of_two_budgets(smallest: int, largest: int) -> tuple[int, ...]:
    """The powers of two from the first that holds `smallest` to the first that holds `largest`."""
    first, last = (max(0, n - 1).bit_length() for n in (smallest, largest))
    return tuple(1 << n for n in range(first, last + 1))


def fill(sizes: Sequence[int], budgets: Sequence[int]) -> list[Batch]:
    """Sort items of `sizes` and put them together as far as the largest of `budgets` goes.

    Raises:
        ValueError: An item is larger than that.
    """
    if max(sizes, default=0) > budgets[-1]:
        raise ValueError(f"an item of {max(sizes)} doesn't fit the largest budget, {budgets[-1]}")
    batches: list[list[int]] = []
    room = 0
    for item in sorted(range(len(sizes)), key=sizes.__getitem__):
        if not batches or sizes[item] > room:
            batches.append([])
            room = budgets[-1]
        batches[-1].append(item)
        room -= sizes[item]
    totals = [sum(sizes[i] for i in batch) for batch in batches]
    fits = [next(b for b in budgets if b >= total) for total in totals]
    return [Batch(tuple(items), budget) for items, budget in zip(batches, fits, strict=True)]


def power_of_two_call(subject: Subject, size: CallSize, inputs: Inputs, smallest: CallSize) -> Call:
    """Capture the graphs that a call needs, and return what makes it.

    Args:
        subject: The tower.
        size: Of the call.
        inputs: Its arguments.
        smallest: Of the smallest call that the graphs are to serve.
    """
    facts = subject.encoder.encoder_facts()
    unit = facts.tokens_per_row  # budgets of a rows tower are rows
    item, least = (s.tokens // s.items // unit for s in (size, smallest))
    budgets = power_of_two_budgets(least, max(item, facts.max_tokens // unit))
    batches = fill([item] * size.items, budgets)
    tower = subject.twin()
    if size.grid is not None:
        use_attention_implementation(tower, VARLEN_ATTENTION)
    replays, start = [], 0
    for batch in batches:  # items of a call are of one size here, so batches keep their order
        rows = inputs.main[start : start + item * len(batch.items)]
        start += len(rows)
        metadata = _metadata(subject, size, smallest, batch) if size.grid is not None else {}
        replays.append(_Replay(tower, rows, metadata, batch.budget, subject.device))
    return partial(_run, replays)


class _Replay:
    """One batch in the graph of its budget, with buffers of its own."""

    def __init__(
        self,
        tower: torch.nn.Module,
        rows: torch.Tensor,
        metadata: dict[str, Any],
        budget: int,
        device: torch.device,
    ) -> None:
        self._rows, self._budget = rows, budget
        self._buffer = rows.new_zeros(budget, *rows.shape[1:])
        # Tensors that a graph reads are overwritten before each replay; ints are baked in.
        self._sources = [v for v in metadata.values() if isinstance(v, torch.Tensor)]
        arguments = {
            n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in metadata.items()
        }
        self._targets = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
        self._replay = captured(device, partial(tower, self._buffer, **arguments))

    def __call__(self) -> list[torch.Tensor]:
        """Views of what belongs to real rows."""
        self._buffer[: len(self._rows)].copy_(self._rows)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        tensors = flatten_outputs(self._replay())
        return [t[: t.shape[0] * len(self._rows) // self._budget] for t in tensors]


def _run(replays: Sequence[_Replay]) -> list[torch.Tensor]:
    parts = [replay() for replay in replays]
    if len(parts) == 1:
        return [tensor.clone() for tensor in parts[0]]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def _metadata(subject: Subject, size: CallSize, smallest: CallSize, batch: Batch) -> dict[str, Any]:
    """Arguments of a batch, padded to the worst that its budget may hold."""
    encoder = subject.encoder
    assert isinstance(encoder, PackedEncoder), "a rows tower has no metadata"
    item, small = (encoder.metadata.item(s.grid or ()) for s in (size, smallest))
    assert item is not None, "image sizes are rounded to merge groups"
    assert small is not None, "image sizes are rounded to merge groups"
    most, count = batch.budget // small.num_tokens, len(batch.items)
    pairs = zip(item.num_segments, small.num_segments, strict=True)
    segments = tuple(max(count * n, most * m) for n, m in pairs)
    key = GraphKey(batch.budget, segments, (batch.budget, *item.max_seqlen[1:]))
    return precomputed_metadata(subject, replace(size, items=count), key)
