"""A report as Markdown: one table a model, below what ran where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmgraph.bench.cells import NONE, number, table
from mmgraph.bench.details import render_details, render_kernels, render_notes
from mmgraph.bench.environment import Environment
from mmgraph.bench.names import BOUND, DEFAULT, EAGER, EXACT, LABELS
from mmgraph.bench.records import Served
from mmgraph.bench.results import Report, Row

__all__ = ["render_markdown", "summarize"]

_LEGEND = (
    "Times are milliseconds of wall clock with a device synchronise after each call, median (p99); "
    'variants take turns. "Speed-up" is eager over mmgraph with an exact budget, "over hand-made" '
    "what mmgraph takes longer than the graph made by hand (! if above both 5 % and 0.25 ms), "
    '"host" the microseconds from the entry of mmgraph (exact) to its return. Errors are relative '
    "to a float32 twin, in the Frobenius norm: eager / mmgraph exact / mmgraph default. "
    '"x bound" is mmgraph with an exact budget over the practical bound, which is all matrix '
    "products and the fastest attention of the call in one graph, and nothing else."
)
_DETAILS = (
    '"x bound" is a variant over the practical bound, "TFLOP/s" the operations of products and '
    "attention by its median; calls and items a second are of calls back to back, without a wait "
    'between them; "first call" is the first of this size, with what had to be captured and '
    'compiled for it, "MiB" what all graphs of the variant held by then.'
)
_KERNELS = (
    "Time of kernels on the device in one call, or of operators on the CPU where there is no GPU."
)


def render_markdown(report: Report) -> str:
    """Return the whole report."""
    parts = ["# mmgraph bench", _head(report), _LEGEND]
    for model, rows in report.by_model.items():
        parts += [f"## {model}", _table(rows), *_below(model, rows)]
    return "\n\n".join(parts) + "\n"


def summarize(row: Row) -> str:
    """Return a row as one line, for following a run."""
    times = "; ".join(f"{LABELS[name]} {number(t.median_ms)}" for name, t in row.timings.items())
    return f"{row.model} {row.size}: {times} ms; {_verdict(row)}"


def _below(model: str, rows: Sequence[Row]) -> Iterator[str]:
    """Everything else about a model, as far as it is there."""
    notes, details, kernels = render_notes(rows), render_details(rows), render_kernels(rows)
    if notes is not None:
        yield notes
    if details is not None:
        yield from (f"### {model}: variants", _DETAILS, details)
    if kernels is not None:
        yield from (f"### {model}: kernels", _KERNELS, kernels)


def _head(report: Report) -> str:
    where = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    lines = [
        f"- {_machine(where)}",
        f"- {versions}, {_commit(where)}",
        f"- {report.dtype}, N = {report.repeats} after {report.warmup} of warm-up, "
        f"random weights, {report.date}",
        f"- `{report.command}`",
    ]
    if not report.complete:
        lines.append("- **not complete**: the run hadn't come further when this was written")
    return "\n".join(lines)


def _machine(where: Environment) -> str:
    driver = f" (driver {where.driver})" if where.driver else ""
    gpu = f"{where.gpu}{driver}, " if where.gpu else "no GPU, "
    return f"{gpu}{where.cpu_count} CPUs ({where.cpu}), {where.platform}"


def _commit(where: Environment) -> str:
    if where.commit is None:
        return "not from a checkout"
    return f"commit {where.commit[:12]}" + (" with uncommitted changes" if where.dirty else "")


def _table(rows: Sequence[Row]) -> str:
    variants = [name for name in LABELS if any(name in row.timings for row in rows)]
    header = ["size", "tokens", *(LABELS[name] for name in variants), "default budget", "speed-up"]
    header += ["x bound"] * (BOUND in variants)
    header += ["over hand-made", "host µs", "errors", "match"]
    return table([header, *(_cells(row, variants) for row in rows)])


def _cells(row: Row, variants: Sequence[str]) -> list[str]:
    times = [row.timings.get(name) for name in variants]
    bound = [f"{row.over_bound[EXACT]:.2f}" if row.over_bound else NONE]
    return [
        row.size,
        str(row.tokens),
        *(NONE if t is None else f"{number(t.median_ms)} ({number(t.p99_ms)})" for t in times),
        _budget(row.served[DEFAULT]),
        f"{row.speedup:.2f}x",
        *bound * (BOUND in variants),
        _overhead(row),
        f"{row.timings[EXACT].host_us:.0f}",
        " / ".join(f"{row.errors[name]:.1e}" for name in (EAGER, EXACT, DEFAULT)),
        _verdict(row),
    ]


def _budget(served: Served) -> str:
    if not served.budgets:
        return "eager"
    padding = f"{100 * served.padding / sum(served.budgets):.0f} % padding"
    budgets = f"{'+'.join(map(str, served.budgets))}, {padding}"
    return f"{budgets}, {served.eager} eager" if served.eager else budgets


def _overhead(row: Row) -> str:
    if row.overhead_ms is None or row.overhead_percent is None:
        return NONE
    mark = "" if row.overhead_ok else " !"
    return f"{row.overhead_ms:+.2f} ms, {row.overhead_percent:+.1f} %{mark}"


def _verdict(row: Row) -> str:
    if not row.match:
        return "NO MATCH"
    return "match" if row.ok else "NOT REPLAYED"
