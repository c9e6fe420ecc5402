"""What is below the main table of a model: each variant in detail, kernels, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmgraph.bench.cells import NONE, number, optional, table
from mmgraph.bench.kernels import CLASSES, shares
from mmgraph.bench.names import LABELS
from mmgraph.bench.results import Row

__all__ = ["render_details", "render_kernels", "render_notes"]

_HEADER = (
    "size",
    "variant",
    "ms",
    "x bound",
    "TFLOP/s",
    "calls/s",
    "items/s",
    "host µs",
    "first call s",
    "capture s",
    "compile s",
    "MiB",
)


def render_details(rows: Sequence[Row]) -> str | None:
    """Return a line for each variant of each row, or ``None`` for files without such facts."""
    if not any(row.throughput for row in rows):
        return None
    lines = [_variant(row, name) for row in rows for name in LABELS if name in row.timings]
    return table([_HEADER, *lines])


def render_kernels(rows: Sequence[Row]) -> str | None:
    """Return kernel time by class, before and after, or ``None`` if it wasn't asked for."""
    lines = [
        [row.size, LABELS[name], number(sum(times.values())), *_shares(times)]
        for row in rows
        for name, times in row.kernels.items()
    ]
    return table([["size", "variant", "kernel ms", *CLASSES], *lines]) if lines else None


def render_notes(rows: Sequence[Row]) -> str | None:
    """Say which variants are missing and why, and which attention the bound is made of."""
    lines = [*_missing(rows), *_attention(rows)]
    return "\n".join(f"- {line}" for line in lines) if lines else None


def _variant(row: Row, name: str) -> list[str]:
    timing, cost = row.timings[name], row.costs.get(name)
    throughput = row.throughput.get(name)
    rates = (None, None) if throughput is None else (throughput.calls_per_s, throughput.items_per_s)
    costs = (
        (None,) * 4
        if cost is None
        else (cost.first_call_s, cost.capture_s, cost.compile_s, cost.mib)
    )
    return [
        row.size,
        LABELS[name],
        number(timing.median_ms),
        f"{row.over_bound[name]:.2f}" if row.over_bound else NONE,
        optional(row.tflops.get(name)),
        *map(optional, rates),
        f"{timing.host_us:.0f}",
        *map(optional, costs),
    ]


def _shares(times: Mapping[str, float]) -> list[str]:
    parts = shares({name: times.get(name, 0.0) for name in CLASSES})
    return [f"{100 * part:.0f} %" for part in parts.values()]


def _missing(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each variant and reason, with the sizes that it holds for."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.absent.items():
            sizes.setdefault((name, reason), []).append(row.size)
    for (name, reason), of in sizes.items():
        yield f"no {LABELS[name]} of {', '.join(of)}: {reason}"


def _attention(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for times in () if row.bound is None else row.bound.attention:
            ranked = sorted(times.microseconds.items(), key=lambda pair: pair[1])
            tried = "; ".join(f"{name} {number(us)}" for name, us in ranked)
            yield f"{row.size}: {times.calls} x attention over {times.shape} (us: {tried})"
