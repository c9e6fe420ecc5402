"""A report as Markdown: one table a model, below what ran where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmgraph.bench.environment import Environment
from mmgraph.bench.results import DEFAULT, EAGER, EXACT, LABELS, Report, Row, Served

__all__ = ["render_markdown", "summarize"]

_NONE = "-"
_LEGEND = (
    "Times are milliseconds of wall clock with a device synchronise after each call, median (p99); "
    'variants take turns. "Speed-up" is eager over mmgraph with an exact budget, "over hand-made" '
    "what mmgraph takes longer than the graph made by hand (! if above both 5 % and 0.25 ms), "
    '"host" the microseconds from the entry of mmgraph (exact) to its return. Errors are relative '
    "to a float32 twin, in the Frobenius norm: eager / mmgraph exact / mmgraph default."
)


def render_markdown(report: Report) -> str:
    """Return the whole report."""
    parts = ["# mmgraph bench", _head(report), _LEGEND]
    for model, rows in report.by_model.items():
        parts += [f"## {model}", _table(rows)]
    return "\n\n".join(parts) + "\n"


def summarize(row: Row) -> str:
    """Return a row as one line, for following a run."""
    times = "; ".join(f"{LABELS[name]} {_number(t.median_ms)}" for name, t in row.timings.items())
    return f"{row.model} {row.size}: {times} ms; {_verdict(row)}"


def _head(report: Report) -> str:
    where = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    return "\n".join(
        [
            f"- {_machine(where)}",
            f"- {versions}, {_commit(where)}",
            f"- {report.dtype}, N = {report.repeats} after {report.warmup} of warm-up, "
            f"random weights, {report.date}",
            f"- `{report.command}`",
        ]
    )


def _machine(where: Environment) -> str:
    driver = f" (driver {where.driver})" if where.driver else ""
    gpu = f"{where.gpu}{driver}, " if where.gpu else "no GPU, "
    return f"{gpu}{where.cpu_count} CPUs ({where.cpu}), {where.platform}"


def _commit(where: Environment) -> str:
    if where.commit is None:
        return "not from a checkout"
    return f"commit {where.commit[:12]}" + (" with uncommitted changes" if where.dirty else "")


def _table(rows: Sequence[Row]) -> str:
    variants = [name for name in LABELS if name in rows[0].timings]
    header = ["size", "tokens", *(LABELS[name] for name in variants), "default budget"]
    header += ["speed-up", "over hand-made", "host µs", "errors", "match"]
    return "\n".join(_lines([header, *(_cells(row, variants) for row in rows)]))


def _lines(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table; columns are padded, so that it also reads in a terminal."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    for line in (cells[0], rule, *cells[1:]):
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def _cells(row: Row, variants: Sequence[str]) -> list[str]:
    times = [row.timings[name] for name in variants]
    return [
        row.size,
        str(row.tokens),
        *(f"{_number(t.median_ms)} ({_number(t.p99_ms)})" for t in times),
        _budget(row.served[DEFAULT]),
        f"{row.speedup:.2f}x",
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
        return _NONE
    mark = "" if row.overhead_ok else " !"
    return f"{row.overhead_ms:+.2f} ms, {row.overhead_percent:+.1f} %{mark}"


def _verdict(row: Row) -> str:
    if not row.match:
        return "NO MATCH"
    return "match" if row.ok else "NOT REPLAYED"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    decimals = next((d for limit, d in ((1, 3), (10, 2), (100, 1)) if value < limit), 0)
    return f"{value:.{decimals}f}"
