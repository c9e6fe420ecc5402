"""Timing variants, and keeping what they return for inputs that none of them has seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from mmgraph.bench.names import BOUND
from mmgraph.bench.records import Throughput
from mmgraph.bench.subject import Inputs
from mmgraph.bench.timing import Call, Timing, calls_per_second, measure, synchronizer
from mmgraph.manager.outputs import flatten_outputs

__all__ = ["JUDGED", "Measured", "measure_variants"]

T = TypeVar("T")

_TIMED = 0
JUDGED = 1
"""Seed of the contents that outputs are for."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What was found out about some variants of a row.

    Attributes:
        timings: One call at a time.
        throughput: Calls back to back.
        outputs: For other inputs than those that were timed, the same in all variants.
    """

    timings: Mapping[str, Timing]
    throughput: Mapping[str, Throughput]
    outputs: Mapping[str, list[torch.Tensor]]

    def without(self, name: str) -> Measured:
        """The same for all variants but one."""

        def others(values: Mapping[str, T]) -> dict[str, T]:
            return {n: value for n, value in values.items() if n != name}

        return Measured(others(self.timings), others(self.throughput), others(self.outputs))

    def __or__(self, other: Measured) -> Measured:
        return Measured(
            {**self.timings, **other.timings},
            {**self.throughput, **other.throughput},
            {**self.outputs, **other.outputs},
        )


def measure_variants(
    calls: Mapping[str, Call], inputs: Inputs, items: int, *, repeats: int, warmup: int
) -> Measured:
    """Time `calls` in turn and each back to back, then call each once for the outputs.

    Args:
        calls: What to time, by name.
        inputs: What they all read; other contents are drawn.
        items: Images, clips or rows in a call.
        repeats: Timed calls of each variant.
        warmup: Calls before them.
    """
    synchronize = synchronizer(inputs.main.device)
    inputs.renew(_TIMED)
    timings = measure(calls, repeats=repeats, warmup=warmup, synchronize=synchronize)
    throughput = {}
    for name, call in calls.items():
        rate = calls_per_second(call, repeats=repeats, synchronize=synchronize)
        throughput[name] = Throughput(n=repeats, calls_per_s=rate, items_per_s=rate * items)
    inputs.renew(JUDGED)
    outputs = {name: _kept(call) for name, call in calls.items() if name != BOUND}
    return Measured(timings, throughput, outputs)


def _kept(call: Call) -> list[torch.Tensor]:
    """Tensors of an output, copied: the next replay of another graph may overwrite them."""
    return [tensor.clone() for tensor in flatten_outputs(call())]
