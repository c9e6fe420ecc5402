"""Host time of decisions: packing the items of a call, fitting a ladder, counting.

    python -m scripts.bench_policy --out docs/benchmarks/DATE-MACHINE

Needs no GPU. Medians (p99) of `-n` rounds on one thread, each of sizes drawn anew, in the order in
which a server meets them: the bounds that are kept for a ladder are there. Writes policy.json and
policy.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from mmgraph.bench.environment import Environment
from mmgraph.bench.timing import percentile
from mmgraph.policy import fit, ladder, pack
from mmgraph.stats import StatsRecorder
from scripts.files import write

__all__ = ["main", "rows"]

_ITEMS = (1, 2, 4, 8, 10, 11, 12, 16, 64)
_SIZES, _BUDGETS = 5000, 32


def rows(repeats: int) -> Iterator[tuple[str, list[float]]]:
    """What was timed, and the microseconds of each round."""
    random, budgets = Random(0), ladder(256, 16384, 16, 4)
    for number in _ITEMS:

        def packing(number: int = number) -> Callable[[], object]:
            sizes = [4 * random.randint(16, 1024) for _ in range(number)]
            return lambda: pack(sizes, budgets)

        yield f"dividing {number} items over 16 budgets", _times(packing, repeats)

    def fitting() -> Callable[[], object]:
        sizes = {n: random.randint(1, 1000) for n in random.sample(range(1, 1 << 17), _SIZES)}
        return lambda: fit(sizes, _BUDGETS)

    yield f"fitting {_BUDGETS} budgets to {_SIZES:,} sizes", _times(fitting, max(3, repeats // 100))
    recorder = StatsRecorder()

    def counting() -> Callable[[], object]:
        sizes = tuple(random.randint(1, 1024) for _ in range(8))
        recorder.seen(sizes)
        return lambda: recorder.seen(sizes)

    yield "counting the sizes of 8 items", _times(counting, repeats)


def _times(prepare: Callable[[], Callable[[], object]], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        run = prepare()
        start = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def render(report: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = ["# Host time of decisions", "", "| what | N | us, median (p99) |", "|---|---|---|"]
    lines += [
        f"| {name} | {row['n']} | {row['median']:,.1f} ({row['p99']:,.1f}) |"
        for name, row in report["rows"].items()
    ]
    machine = ", ".join(f"{k} {v}" for k, v in report["environment"].items() if v)
    return "\n".join(
        [*lines, "", f"{machine}, {report['date']}. Command: `{report['command']}`", ""]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--repeats", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    found = {
        name: {"n": len(times), "median": median(times), "p99": percentile(times, 99)}
        for name, times in rows(options.repeats)
    }
    given = sys.argv[1:] if arguments is None else arguments
    report = {
        "rows": found,
        "environment": asdict(Environment.read(torch.device("cpu"))),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(("python -m scripts.bench_policy", *given)),
    }
    page = render(report)
    print(page)
    write(options.out, "policy", report, page)


if __name__ == "__main__":
    main()
