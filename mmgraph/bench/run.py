"""The loop: models one after another, calls of each, all variants of a call in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone

import torch

from mmgraph.bench.accuracy import Accuracy, compare
from mmgraph.bench.attention import describe
from mmgraph.bench.compiled import MODES, open_compiled
from mmgraph.bench.environment import Environment
from mmgraph.bench.kernels import kernel_times
from mmgraph.bench.measured import JUDGED, Measured, measure_variants
from mmgraph.bench.names import EAGER, EXACT
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.results import Report, Row
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject, open_subject
from mmgraph.bench.timing import Call
from mmgraph.bench.variants import Variants, open_variants
from mmgraph.recipes import Recipe

__all__ = ["run"]

OnRow = Callable[[Report], None]


@torch.no_grad()
def run(options: BenchOptions, command: str = "", on_row: OnRow = lambda report: None) -> Report:
    """Measure everything that `options` name.

    Args:
        options: What to measure.
        command: The command line, for the report.
        on_row: Called after each row with what there is by then; the row is the last one.
    """
    date = datetime.now(timezone.utc)
    report = Report(
        environment=Environment.read(options.device, options.commit),
        command=command,
        date=date.isoformat(timespec="seconds"),
        dtype=str(options.dtype).removeprefix("torch."),
        repeats=options.repeats,
        warmup=options.warmup,
        rows=(),
        complete=False,
    )
    for recipe in options.recipes:
        for row in _measure_model(recipe, options):
            report = replace(report, rows=(*report.rows, row))
            on_row(report)
        _release(options.device)
    return replace(report, complete=True)


def _measure_model(recipe: Recipe, options: BenchOptions) -> Iterator[Row]:
    with open_subject(recipe, options.device, options.dtype) as subject:
        sizes = subject.sizes(options.images, options.batches)
        smallest = min(sizes, key=lambda size: size.tokens // size.items)
        for size in sizes:
            yield _measure_row(subject, size, smallest, options)


def _measure_row(
    subject: Subject, size: CallSize, smallest: CallSize, options: BenchOptions
) -> Row:
    inputs = subject.inputs(size)
    with open_variants(subject, size, inputs, options.baselines, smallest) as variants:
        served = variants.served()
        measured = _measure(variants.calls, inputs, size, options)
        kernels = _profile(variants, options) if options.kernels else {}
    for name in MODES:
        if name in options.baselines:
            compiled = _measure_compiled(subject, size, inputs, name, options, variants)
            measured = measured if compiled is None else measured | compiled
    accuracy = _judge(subject, inputs, measured)
    for name, error in accuracy.wrong(options.dtype).items():  # however fast it was
        variants.absent[name] = f"its outputs are wrong, by {error:.1e} of a float32 twin's"
        measured = measured.without(name)
    return Row(
        model=subject.name,
        size=size.label,
        items=size.items,
        tokens=size.tokens,
        timings=measured.timings,
        errors=accuracy.to_reference,
        errors_to_eager=accuracy.to_eager,
        served=served,
        match=accuracy.matches(options.dtype),
        throughput=measured.throughput,
        costs=variants.costs,
        bound=variants.bound,
        absent=variants.absent,
        kernels=kernels,
    )


def _measure(
    calls: dict[str, Call], inputs: Inputs, size: CallSize, options: BenchOptions
) -> Measured:
    return measure_variants(
        calls, inputs, size.items, repeats=options.repeats, warmup=options.warmup
    )


def _measure_compiled(
    subject: Subject,
    size: CallSize,
    inputs: Inputs,
    name: str,
    options: BenchOptions,
    variants: Variants,
) -> Measured | None:
    """Measure one variant of the compiler by itself; if it fails, note why."""
    try:
        with open_compiled(subject, size, inputs, name) as (call, cost):
            measured = _measure({name: call}, inputs, size, options)
    except Exception as error:
        variants.absent[name] = describe(error)
        return None
    variants.costs[name] = cost
    return measured


def _profile(variants: Variants, options: BenchOptions) -> dict[str, dict[str, float]]:
    """Where the time goes before and after."""
    return {name: kernel_times(variants.calls[name], options.device) for name in (EAGER, EXACT)}


def _judge(subject: Subject, inputs: Inputs, measured: Measured) -> Accuracy:
    """Compare the outputs of all variants."""
    inputs.renew(JUDGED)
    return compare(measured.outputs, inputs.widened().call_eager(subject.reference))


def _release(device: torch.device) -> None:
    """Give the memory of a model back before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
