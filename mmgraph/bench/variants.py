"""The ways of running one call that a row compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mmgraph.attachment import Handle, attach
from mmgraph.bench.handmade import capture_by_hand, precomputed_metadata
from mmgraph.bench.results import DEFAULT, EAGER, EXACT, HAND_MADE, METADATA, Served
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call
from mmgraph.config import GraphConfig
from mmgraph.encoders import use_attention_implementation
from mmgraph.ops import VARLEN_ATTENTION
from mmgraph.stats import EncoderStats

__all__ = ["Variants", "open_variants"]


@dataclass(frozen=True, slots=True, eq=False)
class Variants:
    """What a row times.

    Attributes:
        calls: By name, in the order of the table.
        handles: Of those that mmgraph serves.
    """

    calls: Mapping[str, Call]
    handles: Mapping[str, Handle]

    def served(self) -> dict[str, Served]:
        """Make each call that mmgraph serves twice, and say what it was served from then.

        A call that no budget can serve gets a graph of its own the second time.
        """
        return {name: _served(h, self.calls[name]) for name, h in self.handles.items()}


@contextmanager
def open_variants(subject: Subject, size: CallSize, inputs: Inputs) -> Iterator[Variants]:
    """Prepare every way of making the call that this machine and this tower have."""
    calls: dict[str, Call] = {EAGER: partial(inputs.call_eager, subject.tower)}
    if subject.whole and size.grid is not None:
        calls[METADATA] = _precomputed(subject, size, inputs)
    if subject.whole and subject.device.type == "cuda":
        calls[HAND_MADE] = capture_by_hand(calls.get(METADATA, calls[EAGER]))
    with attach(subject.exact, _exact_config(subject, size)) as handle:
        calls[EXACT] = partial(inputs.call, subject.exact)
        calls[DEFAULT] = partial(inputs.call, subject.default)
        yield Variants(calls, {EXACT: handle, DEFAULT: subject.default_handle})


def _precomputed(subject: Subject, size: CallSize, inputs: Inputs) -> Call:
    use_attention_implementation(subject.precomputed, VARLEN_ATTENTION)  # it is a twin of its own
    return partial(subject.precomputed, inputs.main, **precomputed_metadata(subject, size))


def _exact_config(subject: Subject, size: CallSize) -> GraphConfig:
    if subject.encoder.encoder_facts().layout == "rows":
        return GraphConfig(row_budgets=(size.items,), max_items=size.items)
    return GraphConfig(token_budgets=(size.tokens,), max_items=size.items)


def _served(handle: Handle, call: Call) -> Served:
    call()
    before = handle.stats()
    call()
    after = handle.stats()
    return Served(
        budgets=_replayed(before, after),
        padding=after.padding - before.padding,
        eager=after.items - after.hits - (before.items - before.hits),
    )


def _replayed(before: EncoderStats, after: EncoderStats) -> tuple[int, ...]:
    """Token budget of each replay between two snapshots."""
    earlier = {graph.key: graph.replays for graph in before.graphs}
    return tuple(
        graph.key.token_budget
        for graph in after.graphs
        for _ in range(graph.replays - earlier.get(graph.key, 0))
    )
