"""Random calls from several threads for minutes, while graphs come and go; memory must stay flat.

    python -m scripts.soak --model qwen2.5-vl-7b --threads 4 --streams 3 --seconds 600

Calls have random sizes, on a GPU each thread on one of `--streams` streams. Meanwhile graphs are
freed, budgets refitted, reports written; `max_graphs` is so low that graphs give way to each other.
Every 50th call of a thread is compared with eager mode. Ends with an error if one differs, a thread
fails, an item isn't counted, or memory grows.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn

from mmgraph import GraphConfig, Handle, attach
from mmgraph.encoders import eager_towers
from mmgraph.manager.outputs import flatten_outputs
from mmgraph.manager.verify import largest_error, max_error
from mmgraph.recipes import load_recipe

__all__ = ["Report", "Soak"]

CHECKED = 50
_GROWTH = 1.10
_SLACK_MIB = 64.0


@dataclass
class Report:
    """What came of it.

    Attributes:
        calls: Calls that were made.
        items: Items in them.
        checked: Calls compared with eager mode.
        worst: The largest error of these, as a share of what is allowed.
        evictions: Graphs that had to go to make room for others.
        changes: How often graphs were freed, budgets refitted or a report written.
        reserved_mib: Samples, in the order in which they were taken: on a GPU what torch holds,
            elsewhere the most that the process has taken so far.
        allocated_mib: On a GPU what tensors and graphs hold of that.
        errors: What went wrong.
    """

    calls: int = 0
    items: int = 0
    checked: int = 0
    worst: float = 0.0
    evictions: int = 0
    changes: dict[str, int] = field(default_factory=dict)
    reserved_mib: list[float] = field(default_factory=list)
    allocated_mib: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def is_flat(self) -> bool:
        """Whether the last third of the samples is no higher than the second, but for a tenth."""
        return all(map(_is_flat, (self.reserved_mib, self.allocated_mib)))


def _is_flat(samples: Sequence[float]) -> bool:
    third = len(samples) // 3
    return not third or max(samples[-third:]) <= (
        _GROWTH * max(samples[third : 2 * third]) + _SLACK_MIB
    )


class Soak:
    """Serves one tower from several threads.

    Args:
        recipe: Name of a packed tower's recipe.
        device: Where.
        threads: How many make calls.
        streams: How many streams they share; on a GPU.
        largest: Side of the largest image, in patches.
        seed: Of the sizes and contents.
    """

    def __init__(
        self,
        recipe: str,
        device: torch.device,
        *,
        threads: int,
        streams: int,
        largest: int,
        seed: int = 0,
    ) -> None:
        loaded = load_recipe(recipe)
        if loaded.layout != "packed":
            raise SystemExit(f"--model must be a packed tower, got {recipe}")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.report = Report()
        self._tower: nn.Module = loaded.build_encoder(device=device, dtype=dtype)
        config: Any = self._tower.config
        self._merge = config.spatial_merge_size
        self._width = 3 * config.temporal_patch_size * config.patch_size**2
        self._device, self._dtype = device, dtype
        self._threads, self._largest, self._seed = threads, largest, seed
        self._streams = (
            [torch.cuda.Stream(device) for _ in range(streams)] if device.type == "cuda" else []
        )
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(
        self,
        seconds: float,
        config: GraphConfig,
        between: float = 1.0,
        calls: int | None = None,
    ) -> Report:
        """Soak for `seconds` or, if that comes first, `calls`, with a change every `between`."""
        with attach(self._tower, config) as handle:
            threads = [
                threading.Thread(target=self._guarded, args=(number,), daemon=True)
                for number in range(self._threads)
            ]
            for thread in threads:
                thread.start()
            end, random = time.monotonic() + seconds, Random(self._seed)
            while time.monotonic() < end and not self.report.errors and self._lacks(calls):
                time.sleep(min(between, max(0.0, end - time.monotonic())))
                self._change(handle, random)
                self._measure_memory()
            self._stop.set()
            for thread in threads:
                thread.join(120)
                if thread.is_alive():
                    self.report.errors.append("a thread hangs")
            self._reconcile(handle)
        if not self.report.is_flat():
            self.report.errors.append("memory grows")
        return self.report

    def _lacks(self, calls: int | None) -> bool:
        return calls is None or self.report.calls < calls

    def _change(self, handle: Handle, random: Random) -> None:
        name = random.choices(["nothing", "clear", "refit", "report"], [4, 1, 1, 1])[0]
        if name == "clear":
            handle.clear()
        elif name == "refit":
            handle.refit(random.randint(2, 8))
        elif name == "report":
            handle.report()
        self.report.changes[name] = self.report.changes.get(name, 0) + 1

    def _guarded(self, number: int) -> None:
        try:
            with torch.no_grad(), self._on_stream(number):
                self._serve(Random(self._seed + 1 + number))
        except Exception as error:
            self.report.errors.append(f"thread {number}: {type(error).__name__}: {error}")
            self._stop.set()

    @contextmanager
    def _on_stream(self, number: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[number % len(self._streams)]):
            yield

    def _serve(self, random: Random) -> None:
        generator = torch.Generator(self._device)
        calls = 0
        while not self._stop.is_set():
            calls += 1
            call = self._call(random, generator)
            output = self._tower(**call)
            error = self._error(output, call) if calls % CHECKED == 0 else None
            with self._lock:
                self.report.calls += 1
                self.report.items += len(call["grid_thw"])
                if error is not None:
                    self.report.checked += 1
                    self.report.worst = max(self.report.worst, error)
            if error is not None and not error <= 1:
                raise AssertionError(f"{call['grid_thw'].tolist()} is off by {error:.2f}")

    def _call(self, random: Random, generator: torch.Generator) -> dict[str, torch.Tensor]:
        most, merge = self._largest // self._merge, self._merge
        grids = [
            (
                random.choice([1, 1, 1, 2]),
                merge * random.randint(1, most),
                merge * random.randint(1, most),
            )
            for _ in range(random.randint(1, 4))
        ]
        generator.manual_seed(random.randrange(1 << 30))
        rows = sum(t * h * w for t, h, w in grids)
        patches = torch.randn(
            rows, self._width, dtype=self._dtype, device=self._device, generator=generator
        )
        return {"hidden_states": patches, "grid_thw": torch.tensor(grids)}

    def _error(self, output: Any, call: dict[str, torch.Tensor]) -> float:
        """How far a call is from eager mode, as a share of what a graph may be."""
        with eager_towers():
            grids = call["grid_thw"].to(self._device)
            eager = flatten_outputs(self._tower(**{**call, "grid_thw": grids}))
        return largest_error(flatten_outputs(output), eager) / max_error(eager)

    def _measure_memory(self) -> None:
        report = self.report
        if self._device.type == "cuda":
            report.reserved_mib.append(torch.cuda.memory_reserved(self._device) / 2**20)
            report.allocated_mib.append(torch.cuda.memory_allocated(self._device) / 2**20)
        else:
            report.reserved_mib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)

    def _reconcile(self, handle: Handle) -> None:
        stats = handle.stats()
        self.report.evictions = stats.evictions
        counted = stats.hits + sum(stats.misses.values())
        if not self.report.errors and counted != self.report.items:
            self.report.errors.append(f"{counted} items counted, {self.report.items} sent")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="qwen2.5-vl-7b", help="recipe of a packed tower")
    add("--threads", type=int, default=4)
    add("--streams", type=int, default=3)
    add("--seconds", type=float, default=600.0, help="how long calls are made")
    add("--calls", type=int, help="end after so many, if that comes first")
    add("--between", type=float, default=2.0, help="seconds between changes")
    add("--largest", type=int, default=64, help="side of the largest image in patches")
    add("--max-graphs", type=int, default=12)
    add("--max-graph-mib", type=int, help="bound on the memory of graphs")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    soak = Soak(
        arguments.model,
        torch.device(arguments.device),
        threads=arguments.threads,
        streams=arguments.streams,
        largest=arguments.largest,
        seed=arguments.seed,
    )
    mib = arguments.max_graph_mib
    config = GraphConfig(
        max_graphs=arguments.max_graphs,
        max_graph_bytes=None if mib is None else mib << 20,
        compile_blocks=False,
        verify_every=101,
    )
    report = soak.run(arguments.seconds, config, arguments.between, arguments.calls)
    print(json.dumps({**vars(report), "is_flat": report.is_flat()}, indent=1))
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
