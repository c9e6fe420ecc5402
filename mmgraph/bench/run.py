"""The loop: models one after another, calls of each, all variants of a call in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import datetime, timezone

import torch

from mmgraph.bench.accuracy import Accuracy, compare
from mmgraph.bench.environment import Environment
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.results import Report, Row
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject, open_subject
from mmgraph.bench.timing import measure, synchronizer
from mmgraph.bench.variants import Variants, open_variants
from mmgraph.recipes import Recipe

__all__ = ["run"]

OnRow = Callable[[Row], None]


@torch.no_grad()
def run(options: BenchOptions, command: str = "", on_row: OnRow = lambda row: None) -> Report:
    """Measure everything that `options` name.

    Args:
        options: What to measure.
        command: The command line, for the report.
        on_row: Called with each row when it is there.
    """
    environment, date = Environment.read(options.device, options.commit), datetime.now(timezone.utc)
    rows: list[Row] = []
    for recipe in options.recipes:
        rows += _measure_model(recipe, options, on_row)
        _release(options.device)
    return Report(
        environment=environment,
        command=command,
        date=date.isoformat(timespec="seconds"),
        dtype=str(options.dtype).removeprefix("torch."),
        repeats=options.repeats,
        warmup=options.warmup,
        rows=tuple(rows),
    )


def _measure_model(recipe: Recipe, options: BenchOptions, on_row: OnRow) -> list[Row]:
    rows: list[Row] = []
    with open_subject(recipe, options.device, options.dtype) as subject:
        for size in subject.sizes(options.images, options.batches):
            rows.append(_measure_row(subject, size, options))
            on_row(rows[-1])
    return rows


def _measure_row(subject: Subject, size: CallSize, options: BenchOptions) -> Row:
    inputs = subject.inputs(size)
    with open_variants(subject, size, inputs) as variants:
        served = variants.served()
        timings = measure(
            variants.calls,
            repeats=options.repeats,
            warmup=options.warmup,
            synchronize=synchronizer(options.device),
        )
        accuracy = _judge(subject, inputs, variants)
    return Row(
        model=subject.name,
        size=size.label,
        items=size.items,
        tokens=size.tokens,
        timings=timings,
        errors=accuracy.to_reference,
        errors_to_eager=accuracy.to_eager,
        served=served,
        match=accuracy.matches(options.dtype),
    )


def _judge(subject: Subject, inputs: Inputs, variants: Variants) -> Accuracy:
    """Compare all variants on inputs that none of them has seen."""
    inputs.renew()
    outputs = {name: call() for name, call in variants.calls.items()}
    return compare(outputs, inputs.widened().call_eager(subject.reference))


def _release(device: torch.device) -> None:
    """Give the memory of a model back before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
