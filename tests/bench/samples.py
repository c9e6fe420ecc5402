"""A made-up report, for tests of what is done with reports."""

from __future__ import annotations

from typing import Any

from mmgraph.bench.environment import Environment
from mmgraph.bench.names import (
    BOUND,
    COMPILE,
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    METADATA,
    POWER_OF_TWO,
)
from mmgraph.bench.records import AttentionTimes, Bound, Cost, Served, Throughput
from mmgraph.bench.results import Report, Row
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


def detailed_row(**changes: Any) -> Row:
    """With all that can be measured of a row, but for a compiler that failed."""
    times = {EAGER: 40.0, HAND_MADE: 10.0, POWER_OF_TWO: 20.0, EXACT: 10.0, DEFAULT: 12.0}
    fields: dict[str, Any] = {
        "timings": {name: timing(ms) for name, ms in (times | {BOUND: 8.0}).items()},
        "throughput": {
            name: Throughput(n=30, calls_per_s=1e3 / ms, items_per_s=4e3 / ms)
            for name, ms in times.items()
        },
        "costs": {
            HAND_MADE: Cost(first_call_s=0.5, capture_s=0.5),
            EXACT: Cost(first_call_s=9.0, capture_s=8.5, compile_s=7.25, mib=123.0),
        },
        "bound": Bound(
            products=130,
            products_run=98,
            product_flops=3_000_000_000_000,
            attention_flops=1_000_000_000_000,
            attention=(
                AttentionTimes(
                    shape="4 x 1024 rows, 16 heads of 80",
                    calls=32,
                    flops=31_250_000_000,
                    fastest="dense, cuDNN",
                    microseconds={"segments, flash": 66.0, "dense, cuDNN": 44.0},
                    failed={"dense, flash": "RuntimeError: no"},
                ),
            ),
        ),
        "absent": {COMPILE: "Unsupported: a call of tolist"},
        "kernels": {
            EAGER: {"matmul": 6.0, "attention": 2.0, "norm": 1.0, "copy": 0.0, "other": 1.0},
            EXACT: {"matmul": 6.0, "attention": 2.0, "norm": 0.0, "copy": 0.0, "other": 0.0},
        },
    }
    return row(**{**fields, **changes})


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
