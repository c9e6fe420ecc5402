"""A made-up report, for tests of what is done with reports."""

from __future__ import annotations

from typing import Any

from mmgraph.bench.environment import Environment
from mmgraph.bench.results import (
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    METADATA,
    Report,
    Row,
    Served,
)
from mmgraph.bench.timing import Timing

ENVIRONMENT = Environment(
    gpu="Some GPU",
    driver="580.1",
    cpu="Some CPU",
    cpu_count=16,
    platform="Linux",
    versions={
        "python": "3.12.1",
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "timm": "1.0",
        "mmgraph": "0.1.0",
    },
    commit="0123456789abcdef",
    dirty=True,
)


def timing(median_ms: float) -> Timing:
    return Timing(n=30, median_ms=median_ms, p99_ms=median_ms * 2, min_ms=median_ms, host_us=150.0)


def row(
    *, size: str = "448x4", exact_ms: float = 10.0, exact_eager: int = 0, **changes: Any
) -> Row:
    times = {EAGER: 40.0, METADATA: 30.0, HAND_MADE: 9.9, EXACT: exact_ms, DEFAULT: 12.0}
    fields: dict[str, Any] = {
        "model": "qwen2.5-vl-7b",
        "size": size,
        "items": 4,
        "tokens": 4096,
        "timings": {name: timing(ms) for name, ms in times.items()},
        "errors": dict.fromkeys(times, 0.0123),
        "errors_to_eager": dict.fromkeys(times, 0.004),
        "served": {
            EXACT: Served(budgets=(4096,), padding=0, eager=exact_eager),
            DEFAULT: Served(budgets=(5120,), padding=1024, eager=0),
        },
        "match": True,
    }
    return Row(**{**fields, **changes})


def rows_tower_row() -> Row:
    """Without a GPU and without metadata: three variants."""
    times = {EAGER: 4.0, EXACT: 2.0, DEFAULT: 2.0}
    timings = {name: timing(ms) for name, ms in times.items()}
    return row(size="4", model="clip-l-336", timings=timings)


def report(*rows: Row) -> Report:
    return Report(
        environment=ENVIRONMENT,
        command="mmgraph bench --quick",
        date="2026-01-02T03:04:05+00:00",
        dtype="bfloat16",
        repeats=30,
        warmup=2,
        rows=rows,
    )
