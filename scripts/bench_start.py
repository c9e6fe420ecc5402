"""What a start costs, and what the host does before a replay.

    python -m scripts.bench_start --out docs/benchmarks/DATE-MACHINE

Captures the default budgets of a tower up front in two processes, one after the other: the first
finds an empty compiler cache, the second what the first has left there. Both then make calls of one
image, of a grid that came before and of grids that never did, and note the time from the entry of
the call to the launch of its graph. Writes start.json and start.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from mmgraph import GraphConfig, attach
from mmgraph.bench.environment import Environment
from mmgraph.bench.timing import percentile, synchronizer
from mmgraph.encoders import encoder_for, find_towers
from mmgraph.graphs import CapturedGraph
from mmgraph.recipes import load_recipe
from scripts.files import write

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_GRIDS = 60
_IMPORTS = "import mmgraph.attachment, torch._dynamo, torch._inductor.compile_fx, transformers"


@contextmanager
def launches() -> Iterator[list[int]]:
    """Within the block the moments at which graphs are replayed are noted, in nanoseconds."""
    moments: list[int] = []

    def noting(replay: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(self: Any) -> Any:
            moments.append(time.perf_counter_ns())
            return replay(self)

        return noted

    with ExitStack() as stack:
        for kind in CapturedGraph.__subclasses__():
            stack.enter_context(patch.object(kind, "replay", noting(kind.replay)))
        yield moments


def grids(tokens: int, merge: int, count: int) -> list[list[int]]:
    """Different images of between half of `tokens` and all of them."""
    sides = range(merge, tokens // merge + 1, merge)
    fitting = [[1, h, w] for h in sides for w in sides if tokens // 2 < h * w <= tokens]
    return fitting[:: max(1, len(fitting) // count)][:count]


def child(model: str, repeats: int, budgets: Sequence[int] | None) -> dict[str, Any]:
    """Capture, and call; to be run in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    synchronize = synchronizer(device)
    tower = load_recipe(model).build_encoder(device=device, dtype=dtype)
    synchronize()
    before, live = _reserved(device), _allocated(device)
    start = time.perf_counter()
    handle = attach(tower, GraphConfig(capture="upfront", token_budgets=budgets))
    synchronize()
    seconds = time.perf_counter() - start
    stats = handle.stats()
    report: dict[str, Any] = {
        "seconds": seconds,
        "budgets": len(stats.budgets),
        "largest": stats.budgets[-1],
        "graphs": len(stats.graphs),
        "graph_mib": stats.graph_bytes / 2**20,
        "grown_mib": (_reserved(device) - before) / 2**20,
        "allocated_mib": (_allocated(device) - live) / 2**20,
    }
    (found,) = find_towers(tower)
    merge = int(getattr(tower, "spatial_merge_size", 1))
    width = encoder_for(found).example_call()[found.main_input or "hidden_states"].shape[-1]
    budget = min(stats.budgets, key=lambda tokens: abs(tokens - 1024))
    new = grids(budget, merge, _GRIDS)
    with launches() as moments:

        def entry_to_launch(grid: Sequence[int]) -> float:
            pixels = torch.randn(grid[1] * grid[2], width, device=device, dtype=dtype)
            grid_thw = torch.tensor([list(grid)])
            synchronize()
            moments.clear()
            entry = time.perf_counter_ns()
            tower(pixels, grid_thw=grid_thw)
            launched = moments[0] if moments else time.perf_counter_ns()
            synchronize()
            return (launched - entry) / 1e3

        report["new_grid_us"] = _summary([entry_to_launch(grid) for grid in new])
        report["known_grid_us"] = _summary([entry_to_launch(new[0]) for _ in range(repeats)])
    report["misses"] = {reason.name: n for reason, n in handle.stats().misses.items()}
    report["environment"] = asdict(Environment.read(device))
    handle.detach()
    return report


def _reserved(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"n": len(times), "median": median(times), "p99": percentile(times, 99)}


def run(model: str, repeats: int, budgets: Sequence[int] | None) -> dict[str, Any]:
    """Both processes."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in _CACHES}
        environment = {**os.environ, **caches}
        if sys.dont_write_bytecode:  # pip leaves packages with theirs, some images come without
            environment["PYTHONDONTWRITEBYTECODE"] = ""
            environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "bytecode")
        subprocess.run([sys.executable, "-c", _IMPORTS], env=environment, check=True)
        for name in ("cold", "warm"):
            command = [sys.executable, "-m", "scripts.bench_start", "--child"]
            command += ["--model", model, "-n", str(repeats)]
            if budgets is not None:
                command += ["--budgets", *map(str, budgets)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            runs[name] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    machine = runs["cold"].pop("environment")
    runs["warm"].pop("environment")
    return {"model": model, "runs": runs, "environment": machine}


def render(report: dict[str, Any]) -> str:
    """The figures as a page."""
    cold = report["runs"]["cold"]
    lines = [
        f"# A start with {cold['budgets']} budgets of {report['model']}, up to {cold['largest']:,} "
        "patches",
        "",
        "| compiler cache | start, s | graphs | graphs, MiB | tensors beyond the model's, MiB | "
        "torch holds beyond that before, MiB | known grid, entry to replay, us | new grid, us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["runs"].items():
        known, new = row["known_grid_us"], row["new_grid_us"]
        lines.append(
            f"| {name} | {row['seconds']:.1f} | {row['graphs']} | {row['graph_mib']:.0f} | "
            f"{row['allocated_mib']:.0f} | {row['grown_mib']:.0f} | "
            f"{known['median']:.0f} ({known['p99']:.0f}) | "
            f"{new['median']:.0f} ({new['p99']:.0f}) |"
        )
    environment = ", ".join(f"{k} {v}" for k, v in report["environment"].items() if v)
    return "\n".join(
        [
            *lines,
            "",
            f"Medians (p99) of {cold['known_grid_us']['n']} calls with one image of a grid that "
            f"came before, and of {cold['new_grid_us']['n']} with grids that never did, each call "
            "waited for. A start is `attach(tower, GraphConfig(capture='upfront'))`, compiling and "
            "the checks of each graph included. What torch holds beyond graphs and tensors is free "
            "memory between others, where weights lay before they were padded.",
            "",
            f"{environment}, {report['date']}. Command: `{report['command']}`",
            "",
        ]
    )


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write, or be one of the two processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-vl-7b")
    parser.add_argument("-n", "--repeats", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="+", help="the default ones if not given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(options.model, options.repeats, options.budgets)))
        return
    report = run(options.model, options.repeats, options.budgets)
    report["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    given = sys.argv[1:] if arguments is None else arguments
    report["command"] = " ".join(("python -m scripts.bench_start", *given))
    page = render(report)
    print(page)
    write(options.out, "start", report, page)


if __name__ == "__main__":
    main()
