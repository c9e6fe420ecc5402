"""What Python's garbage collector costs while a tower is captured.

Captures the budgets of a tower in a process with many live objects, in four ways, in turns::

    python -m scripts.bench_collector --out docs/benchmarks/DATE-MACHINE

writes collector.json and collector.md there. Needs a CUDA device for figures that mean anything.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmgraph import GraphConfig, attach
from mmgraph.bench.environment import Environment
from mmgraph.recipes import load_recipe
from scripts.files import write

BUDGETS = tuple(256 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32))
TINY_BUDGETS = tuple(4 * n for n in range(4, 20))
ENVIRONMENT = "MMGRAPH_ENABLE_CUDAGRAPH_GC"


def clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def collector_left_alone() -> Iterator[None]:
    os.environ[ENVIRONMENT] = "1"
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]


class Capture:
    """Captures all budgets of a tower once, in one of the ways."""

    def __init__(self, tower: nn.Module, budgets: tuple[int, ...]) -> None:
        self._tower = tower
        self._config = GraphConfig(token_budgets=budgets, max_items=1, max_graphs=len(budgets))

    def frozen(self) -> int:
        """As mmgraph does it: frozen and disabled, nothing collected."""
        return self._capture()

    def frozen_and_collected(self) -> int:
        """Frozen, with a full collection before and after, as in vLLM's freeze_gc."""
        gc.collect()
        graphs = self._capture()
        gc.collect()
        return graphs

    def not_frozen(self) -> int:
        """The collector runs when it likes."""
        with collector_left_alone():
            return self._capture()

    def collected_each_time(self) -> int:
        """A collection and an emptied cache before each graph, as in torch.cuda.graph."""
        with collector_left_alone():
            return self._capture(before_each=clean_up)

    def _capture(self, before_each: Callable[[], None] = lambda: None) -> int:
        with attach(self._tower, self._config) as handle:
            manager = handle._methods[0].manager
            assert manager is not None
            manager.capture(progress=lambda _: before_each())
            return len(handle.stats().graphs)


def measure(way: Callable[[], int]) -> dict[str, float]:
    """Seconds, peak memory in MiB over what there was, and graphs of one way."""
    clean_up()
    cuda = torch.cuda.is_available()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    graphs = way()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_reserved() - before if cuda else 0
    return {"seconds": seconds, "peak_mib": peak / 2**20, "graphs": graphs}


def render(report: dict[str, Any]) -> str:
    rows = report["ways"]
    first = statistics.median(r["seconds"] for r in rows["frozen"])
    lines = [
        f"# Capturing {report['budgets']} budgets of {report['model']} among "
        f"{report['objects']:,} live Python objects",
        "",
        "| the collector | seconds (median) | min to max | of the first | peak MiB | graphs |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        seconds = sorted(r["seconds"] for r in runs)
        median = statistics.median(seconds)
        peak = max(r["peak_mib"] for r in runs)
        lines.append(
            f"| {name.replace('_', ' ')} | {median:.2f} | {seconds[0]:.2f} to {seconds[-1]:.2f} | "
            f"{median / first:.1f} x | {peak:.0f} | {runs[0]['graphs']:.0f} |"
        )
    environment = ", ".join(f"{k} {v}" for k, v in report["environment"].items() if v)
    lines += [
        "",
        f"One full collection of these objects: {report['collection_seconds']:.2f} s. "
        f"{len(rows['frozen'])} runs of each way in turns, after one of each that doesn't count.",
        "",
        f"{environment}, {report['date']}. Command: `{report['command']}`",
    ]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-vl-7b")
    parser.add_argument("--objects", type=int, default=2_000_000)
    parser.add_argument("-n", "--repeats", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tower = load_recipe(options.model).build_encoder(device=device, dtype=dtype)
    budgets = TINY_BUDGETS if options.model.endswith(":tiny") else BUDGETS
    capture = Capture(tower, budgets)
    ways = {
        "frozen": capture.frozen,
        "frozen_and_collected": capture.frozen_and_collected,
        "not_frozen": capture.not_frozen,
        "collected_each_time": capture.collected_each_time,
    }
    capture.frozen()  # libraries load and kernels are chosen in the first captures of a process
    alive = [[number] for number in range(options.objects)]
    start = time.perf_counter()
    gc.collect()
    collection = time.perf_counter() - start
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            runs[name].append(measure(way))
            print(name, {k: round(v, 2) for k, v in runs[name][-1].items()}, flush=True)
    report = {
        "model": options.model,
        "budgets": len(budgets),
        "objects": len(alive),
        "collection_seconds": collection,
        "ways": runs,
        "environment": asdict(Environment.read(device, options.commit)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(("python -m scripts.bench_collector", *sys.argv[1:])),
    }
    page = render(report)
    print(page)
    write(options.out, "collector", report, page)


if __name__ == "__main__":
    main()
