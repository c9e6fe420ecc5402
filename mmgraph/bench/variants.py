"""The ways of running one call that a row compares, but for those of the compiler."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from mmgraph.attachment import Handle, attach
from mmgraph.bench.attention import describe
from mmgraph.bench.bound import measure_bound, workload_of
from mmgraph.bench.handmade import capture_by_hand, lean_call
from mmgraph.bench.names import BOUND, DEFAULT, EAGER, EXACT, HAND_MADE, METADATA, POWER_OF_TWO
from mmgraph.bench.power_of_two import power_of_two_call
from mmgraph.bench.records import Bound, Cost, Served
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call, synchronizer
from mmgraph.config import GraphConfig
from mmgraph.stats import EncoderStats

__all__ = ["Variants", "open_variants"]


@dataclass(slots=True, eq=False)
class Variants:
    """What a row times.

    Attributes:
        device: Where they run.
        calls: By name.
        handles: Of those that mmgraph serves.
        costs: What it took to make graphs.
        absent: Why variants that were asked for aren't in `calls`.
        bound: What the practical bound consists of, if it is there.
    """

    device: torch.device
    calls: dict[str, Call] = field(default_factory=dict)
    handles: dict[str, Handle] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    bound: Bound | None = None

    def served(self) -> dict[str, Served]:
        """Make each call that mmgraph serves twice, and say what it was served from then.

        A call that no budget can serve gets a graph of its own the second time.
        """
        served = {}
        for name, handle in self.handles.items():
            self.costs[name] = _first_call(handle, self.calls[name], self.device)
            served[name] = _served(handle, self.calls[name])
        return served


@contextmanager
def open_variants(
    subject: Subject,
    size: CallSize,
    inputs: Inputs,
    baselines: Collection[str] = (),
    smallest: CallSize | None = None,
) -> Iterator[Variants]:
    """Prepare every way of making the call that this machine and this tower have.

    Args:
        subject: The tower.
        size: Of the call.
        inputs: Its arguments.
        baselines: Variants to prepare besides eager mode and mmgraph.
        smallest: Of the smallest call that graphs with budgets are to serve; by default `size`.
    """
    variants = Variants(subject.device, {EAGER: partial(inputs.call_eager, subject.tower)})
    baseline = _Baselines(subject, size, inputs, smallest or size, variants)
    with attach(subject.exact, _exact_config(subject, size)) as handle:  # weights may move here
        for name in (METADATA, HAND_MADE, POWER_OF_TWO):
            if name in baselines and not (name == METADATA and size.grid is None):
                baseline.add(name)
        variants.calls[EXACT] = partial(inputs.call, subject.exact)
        variants.calls[DEFAULT] = partial(inputs.call, subject.default)
        variants.handles |= {EXACT: handle, DEFAULT: subject.default_handle}
        if BOUND in baselines:
            baseline.add(BOUND)
        yield variants


@dataclass(frozen=True, slots=True, eq=False)
class _Baselines:
    """Makes baselines; one that can't be made is noted instead."""

    subject: Subject
    size: CallSize
    inputs: Inputs
    smallest: CallSize
    variants: Variants

    def add(self, name: str) -> None:
        """Put `name` into `calls`, or the reason why not into `absent`."""
        missing = self._missing(name)
        if missing is not None:
            self.variants.absent[name] = missing
            return
        makers: Mapping[str, Callable[[], Call]] = {
            METADATA: self._lean_call,
            HAND_MADE: lambda: capture_by_hand(self._lean_call()),
            POWER_OF_TWO: lambda: power_of_two_call(
                self.subject, self.size, self.inputs, self.smallest
            ),
            BOUND: self._bound,
        }
        start = time.perf_counter()
        try:
            self.variants.calls[name] = makers[name]()
        except Exception as error:
            self.variants.absent[name] = describe(error)
            return
        if name in (HAND_MADE, POWER_OF_TWO):
            seconds = time.perf_counter() - start
            self.variants.costs[name] = Cost(first_call_s=seconds, capture_s=seconds)

    def _missing(self, name: str) -> str | None:
        """Why this row can't have a baseline."""
        if name == BOUND:
            return None
        if not self.subject.whole:
            return "the arguments of this tower fit no layout, so one graph can't hold it"
        if name != METADATA and self.subject.device.type != "cuda":
            return "it needs a CUDA device"
        return None

    def _lean_call(self) -> Call:
        return lean_call(self.subject, self.size, self.inputs, self.subject.twin())

    def _bound(self) -> Call:
        workload = workload_of(self.subject, self.size, self.inputs)
        bound = measure_bound(workload, self.subject.device)
        self.variants.bound = bound.facts
        return bound.call


def _exact_config(subject: Subject, size: CallSize) -> GraphConfig:
    if subject.encoder.encoder_facts().layout == "rows":
        return GraphConfig(row_budgets=(size.items,), max_items=size.items)
    return GraphConfig(token_budgets=(size.tokens,), max_items=size.items)


def _first_call(handle: Handle, call: Call, device: torch.device) -> Cost:
    """Make the first call, with all captures that it needs."""
    before, compiling, synchronize = handle.stats(), _compile_seconds(), synchronizer(device)
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    seconds, after = time.perf_counter() - start, handle.stats()
    return Cost(
        first_call_s=seconds,
        capture_s=max(0.0, after.capture_seconds - before.capture_seconds),
        compile_s=_compile_seconds() - compiling,
        mib=after.graph_bytes / 2**20,
    )


def _compile_seconds() -> float:
    """Seconds that the compiler has taken in this process, by its own count."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))


def _served(handle: Handle, call: Call) -> Served:
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
