"""Total encoder time of ``scripts.traces``, in six ways and by the best of each call.

    python -m scripts.bench_traces --model qwen2.5-vl-7b --out docs/benchmarks/DATE-MACHINE

Each way has a tower of its own, and first plans every call of the trace in its order, without
computing it: so the graphs are there that would be after a while of such service. Then all take
turns, in an order by chance and with pauses between: a kind of call is timed in all of them before
the next one comes. A kind that comes three
times or more is called once and then timed (the fastest of `--repeats`). A rarer kind is timed as
it comes, once, and again where a graph was captured for it meanwhile. What mmgraph doesn't do
clearly faster than eager mode is timed some more times in all of them.

Where `--kinds` or `--seconds` bound what is timed, frequent and rare kinds come in turn, the rare
ones in an order drawn by chance. Each counts as often as it occurs, and stands for the calls of its
sort, frequent or rare, that weren't timed. `--seconds` is for all that follows once the towers are
built; each trace has an equal share of what is left of it, attaching, capturing and compiling
included. Writes traces-MODEL.json and traces-MODEL.md after each trace.

Ways:

- eager: the tower as transformers builds it.
- usual: a graph for each power of two, with metadata at its worst; items sorted by size and put
  together as far as the largest budget goes. mmgraph's preparation of the tower is off.
- usual, our kernels: the same with everything that mmgraph does to the tower itself.
- mmgraph, as few: with as many graphs as these, their budgets fitted to the trace as
  ``mmgraph plan`` does it.
- mmgraph, fitted: with 16 graphs, 8 of them for budgets fitted to the trace; the others are of
  exactly the sizes that come often.
- mmgraph: with its default settings, but for `--max-graphs`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mmgraph import GraphConfig, Handle, attach
from mmgraph.bench.environment import Environment
from mmgraph.bench.power_of_two import power_of_two_budgets
from mmgraph.recipes import load_recipe
from scripts.files import write
from scripts.traces import MODELS, TRACES, Grid, make_trace
from scripts.traces_page import BEST, ratios, render, summary
from scripts.traces_records import (
    Kind,
    by_kind,
    facts_of,
    fitted_budgets,
    in_turn,
    tokens_of,
    total_of,
    weights_of,
)
from scripts.traces_timing import Lane, Race
from scripts.usual_planner import plan_as_usual, plan_only

__all__ = ["WAYS", "Bench"]

_PLAIN: dict[str, Any] = dict.fromkeys(
    (
        "compile_blocks",
        "align_weights",
        "choose_attention",
        "merge_weights",
        "fuse_activations",
        "fuse_epilogues",
    ),
    False,
)
_USUAL: dict[str, Any] = {"mode": "full", "exact_after": 0}
CPU = torch.device("cpu")
_FITTED = 16
"""Graphs of the way whose budgets are fitted to the trace; it has half as many budgets."""


class Bench:
    """Measures one model's tower.

    Args:
        recipe: Name of a recipe of a family in ``MODELS``.
        device: Where.
        kinds: Kinds of call of a trace to time, at most.
        repeats: How often each frequent one is timed.
        seconds: What ``run`` may take, about.
        shrink: Divides the sides of all grids, for tiny models.
        traces: Names of those to measure.
        max_graphs: Of the way "mmgraph"; ``None`` for the default.
        clock: Tells seconds.
    """

    def __init__(
        self,
        recipe: str,
        device: torch.device,
        *,
        kinds: int = 200,
        repeats: int = 3,
        seconds: float = 120.0,
        shrink: int = 1,
        traces: Sequence[str] = tuple(TRACES),
        max_graphs: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = GraphConfig() if max_graphs is None else GraphConfig(max_graphs=max_graphs)
        self.recipe = load_recipe(recipe)
        if self.recipe.family not in MODELS:
            raise SystemExit(f"--model must be of {', '.join(MODELS)}, got {recipe}")
        self.device = device
        self._kinds, self._repeats, self._shrink = kinds, repeats, shrink
        self._traces, self._seconds, self._clock = traces, seconds, clock
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tower = self.recipe.build_encoder(device=device, dtype=self._dtype)
        self.towers = {way: copy.deepcopy(tower) for way in WAYS}
        config: Any = tower.config
        self._width = 3 * config.temporal_patch_size * config.patch_size**2
        self._merge = int(config.spatial_merge_size)
        self._patches = torch.empty(0)

    def run(self, calls: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Traces by name with what came out of each, one after another."""
        end = self._clock() + self._seconds
        for done, name in enumerate(self._traces):
            now = self._clock()
            until = now + max(0.0, end - now) / (len(self._traces) - done)
            trace = make_trace(name, self.recipe.family, calls=calls)
            yield name, self._trace([tuple(map(self._shrunk, call)) for call in trace.calls], until)

    def _shrunk(self, grid: Grid) -> Grid:
        merge, n = self._merge, self._shrink
        t, h, w = grid
        return t, max(merge, h // n // merge * merge), max(merge, w // n // merge * merge)

    @torch.no_grad()
    def _trace(self, calls: Sequence[Kind], end: float) -> dict[str, Any]:
        start, counts = self._clock(), Counter(calls)
        shape = (max(tokens_of(kind) for kind in counts), self._width)
        generator = torch.Generator(self.device).manual_seed(0)
        self._patches = torch.randn(
            shape, dtype=self._dtype, device=self.device, generator=generator
        )
        with ExitStack() as stack:
            lanes = {way: make(self, stack, way, counts) for way, make in WAYS.items()}
            eager, *others = lanes.values()
            for lane in others:
                lane.result.settling_s += self._timed(lane.plan, calls)
            race = Race(eager, others, repeats=self._repeats, wait=self._wait, clock=self._clock)
            timed = race.run(in_turn(counts)[: self._kinds], counts, end)
            for lane in lanes.values():
                lane.result.count(lane.stats())
        results = {way: lane.result for way, lane in lanes.items()}
        weights = weights_of(timed, counts)
        for result in results.values():
            result.judge(weights, eager.result)
        totals = {way: 1e3 * total_of(result.seconds, weights) for way, result in results.items()}
        best = {kind: min(r.seconds[kind] for r in results.values()) for kind in timed}
        totals[BEST] = 1e3 * total_of(best, weights)
        return {
            "calls": sum(counts.values()),
            "kinds": len(counts),
            "timed_calls": sum(counts[kind] for kind in timed),
            "timed_kinds": len(timed),
            "stands_for": round(sum(weights.values())),
            "seconds": round(self._clock() - start, 1),
            "total_ms": {way: round(ms, 3) for way, ms in totals.items()},
            "ratios": ratios(totals),
            "ways": {way: facts_of(result) for way, result in results.items()},
            "by_kind": by_kind(timed, weights, results),
        }

    def _timed(self, plan: Callable[[Kind], None], calls: Sequence[Kind]) -> float:
        start = self._clock()
        for kind in calls:
            plan(kind)
        self._wait()
        return self._clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def call(self, kind: Kind, grids_on: torch.device = CPU) -> dict[str, torch.Tensor]:
        """The arguments of a call."""
        grid = torch.tensor(kind, dtype=torch.int64, device=grids_on)
        return {"hidden_states": self._patches[: tokens_of(kind)], "grid_thw": grid}

    def eager(self, _: ExitStack, way: str, counts: Counter[Kind]) -> Lane:
        """The tower as it is, with its grids where it doesn't have to upload them."""
        return Lane(self.towers[way], lambda kind: self.call(kind, self.device))

    def attached(self, stack: ExitStack, way: str, config: GraphConfig) -> tuple[Lane, Handle]:
        """The tower with graphs."""
        tower = self.towers[way]
        handle = stack.enter_context(attach(tower, config))
        lane = Lane(tower, self.call, handle.stats, is_ours=way.startswith("mmgraph"))
        lane.plan = lambda kind: plan_only(handle, self.call(kind))
        return lane, handle

    def usual(self, stack: ExitStack, way: str, counts: Counter[Kind], **config: Any) -> Lane:
        """Powers of two."""
        budgets = usual_budgets(counts)
        settings = GraphConfig(
            token_budgets=budgets,
            max_graphs=len(budgets),
            max_items=max(1, min(8, budgets[-1] // 4)),
            **_USUAL,
            **config,
        )
        lane, handle = self.attached(stack, way, settings)
        plan_as_usual(handle, budgets, map(self.call, counts))
        return lane

    def fitted(
        self, stack: ExitStack, way: str, counts: Counter[Kind], number: int, graphs: int
    ) -> Lane:
        """So many budgets for this trace; graphs beyond them are of exactly some tokens."""
        budgets = fitted_budgets(counts, number, self._merge**2)
        settings: dict[str, Any] = {} if graphs > number else {"exact_after": 0}
        settings["max_items"] = max(1, min(8, budgets[-1] // 4))
        config = GraphConfig(token_budgets=budgets, max_graphs=graphs, **settings)
        return self.attached(stack, way, config)[0]


def usual_budgets(kinds: Iterable[Kind]) -> tuple[int, ...]:
    """Powers of two for the items of these calls, up to what mmgraph captures by default."""
    items = [t * h * w for kind in kinds for t, h, w in kind]
    return power_of_two_budgets(min(items), max(min(16384, 4 * max(items)), max(items)))


def _as_few(counts: Iterable[Kind]) -> tuple[int, int]:
    """As many budgets and graphs as there are powers of two."""
    number = len(usual_budgets(counts))
    return number, number


WAYS: dict[str, Callable[[Bench, ExitStack, str, Counter[Kind]], Lane]] = {
    "eager": Bench.eager,
    "usual": lambda bench, *args: bench.usual(*args, **_PLAIN),
    "usual, our kernels": Bench.usual,
    "mmgraph, as few": lambda bench, *args: bench.fitted(*args, *_as_few(args[-1])),
    "mmgraph, fitted": lambda bench, *args: bench.fitted(*args, _FITTED // 2, _FITTED),
    "mmgraph": lambda bench, stack, way, _: bench.attached(stack, way, bench.config)[0],
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="qwen2.5-vl-7b", help="name of a recipe")
    add("--out", type=Path, required=True, help="folder for the report")
    add("--calls", type=int, default=500, help="calls of a trace")
    add("--kinds", type=int, default=200, help="kinds of call of a trace to time, at most")
    add("--repeats", type=int, default=3, help="timings of each, of which the fastest counts")
    add("--seconds", type=float, default=120.0, help="what all may take, about")
    add("--shrink", type=int, default=1, help="divide the sides of grids, for tiny models")
    add("--traces", nargs="+", choices=list(TRACES), default=list(TRACES), help="which ones")
    most = GraphConfig().max_graphs
    add("--max-graphs", type=int, default=most, help='graphs of the way "mmgraph", at most')
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    bench = Bench(
        arguments.model,
        device,
        kinds=arguments.kinds,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        shrink=arguments.shrink,
        traces=arguments.traces,
        max_graphs=arguments.max_graphs,
    )
    report: dict[str, Any] = {
        "model": arguments.model,
        "command": f"python -m scripts.bench_traces --model {arguments.model} --out OUT "
        f"--calls {arguments.calls} --kinds {arguments.kinds} --repeats {arguments.repeats} "
        f"--seconds {arguments.seconds:g} --shrink {arguments.shrink} "
        f"--max-graphs {arguments.max_graphs}",
        "traces": {},
        "environment": asdict(Environment.read(device)),
    }
    for trace, result in bench.run(arguments.calls):
        report["traces"][trace] = result
        report["all"] = summary(report["traces"])
        _write(report, arguments.out)
    print(render(report))


def _write(report: Mapping[str, Any], out: Path) -> None:
    write(out, "traces-" + report["model"].replace(":", "-"), report, render(report))


if __name__ == "__main__":
    main()
