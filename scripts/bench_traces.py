"""Total encoder time of ``scripts.traces``, in six ways and by the best of each call.

    python -m scripts.bench_traces --model qwen2.5-vl-7b --out docs/benchmarks/DATE-MACHINE

A kind of call that comes three times or more is made a few times first, so that graphs are captured
as they would be after some minutes of service, and is then timed (the fastest of `--repeats`). A
rarer kind is timed as it comes, once, and again where a graph was captured for it meanwhile. What
takes about as long as eager mode is timed again, in turn with it; that says which is faster. Where
`--kinds` or `--seconds` bound what is timed, frequent and rare kinds are timed in turn, the rare
ones in an order drawn by chance. Totals are of those that every way was timed on: each counts as
often as it occurs, and stands for the calls of its sort, frequent or rare, that weren't timed.
Writes traces-MODEL.json and traces-MODEL.md after each trace.

`--seconds` is for all that follows once the tower is built. Each trace has an equal share of what
is left of it, each way an equal share of what is left of its trace's: what one doesn't use goes to
the next. Attaching, capturing and compiling count. Calls before the timed ones have up to half of a
way's share; frequent kinds that they don't reach are called once before they are timed. The most
frequent kind of a trace is always called and timed in full, whatever that takes.

Ways:

- eager: the tower as transformers builds it.
- usual: a graph for each power of two, with metadata at its worst; items sorted by size and put
  together as far as the largest budget goes. mmgraph's preparation of the tower is off.
- usual, our kernels: the same with everything that mmgraph does to the tower itself.
- mmgraph, as few: with as many graphs as these, their budgets fitted to the trace as
  ``mmgraph plan`` does it.
- mmgraph, fitted: the same with 16 graphs.
- mmgraph: with its default settings, but for `--max-graphs`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Result,
    Turn,
    by_kind,
    facts_of,
    fitted_budgets,
    in_turn,
    padding_of,
    tokens_of,
    weights_of,
)
from scripts.traces_timing import CPU, KindTimer
from scripts.usual_planner import plan_as_usual

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
_SETTLING_CALLS = 10
_FITTED = 16
"""Graphs, and budgets, of the way whose budgets are fitted to the trace."""


class Bench(KindTimer):
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
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tower = self.recipe.build_encoder(device=device, dtype=dtype)
        super().__init__(tower, device, repeats, clock)
        self._kinds, self._shrink = kinds, shrink
        self._traces, self._seconds = traces, seconds
        config: Any = self.tower.config
        self._width = 3 * config.temporal_patch_size * config.patch_size**2
        self._dtype = dtype

    def run(self, calls: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Traces by name with what came out of each, one after another."""
        end = self._clock() + self._seconds
        for done, name in enumerate(self._traces):
            until = self._share(end, len(self._traces) - done)
            trace = make_trace(name, self.recipe.family, calls=calls)
            counts = Counter(tuple(map(self._shrunk, call)) for call in trace.calls)
            yield name, self._trace(counts, until)

    def _share(self, end: float, of: int) -> float:
        """When the first of `of` equal shares of the time from now to `end` is over."""
        now = self._clock()
        return now + max(0.0, end - now) / of

    def _shrunk(self, grid: Grid) -> Grid:
        merge, n = 2, self._shrink
        t, h, w = grid
        return t, max(merge, h // n // merge * merge), max(merge, w // n // merge * merge)

    @torch.no_grad()
    def _trace(self, counts: Counter[Kind], end: float) -> dict[str, Any]:
        start = self._clock()
        kinds = in_turn(counts)[: self._kinds]
        most = max(tokens_of(kind) for kind in kinds)
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (most, self._width)
        self._patches = torch.randn(
            shape, dtype=self._dtype, device=self.device, generator=generator
        )
        results: dict[str, Result] = {}
        reach = len(kinds)
        for way, make in WAYS.items():
            now, until = self._clock(), self._share(end, len(WAYS) - len(results))
            eager = results["eager"].seconds if way.startswith("mmgraph") else {}
            turn = Turn(kinds, counts, reach, now, (now + until) / 2, until, eager)
            results[way] = make(self, turn)
            # Totals are over what all have timed: the time for more goes to the ways that follow.
            reach = len(results[way].seconds)
            took = self._clock() - now
            print(f"{way}: {reach} kinds timed, {took:.1f} of {until - now:.1f} s", file=sys.stderr)
        timed = [kind for kind in kinds if all(kind in r.seconds for r in results.values())]
        weights = weights_of(timed, counts)
        totals = {
            way: sum(weights[kind] * 1e3 * result.seconds[kind] for kind in timed)
            for way, result in results.items()
        }
        totals[BEST] = sum(
            weights[kind] * 1e3 * min(r.seconds[kind] for r in results.values()) for kind in timed
        )
        eager = results["eager"].seconds
        for result in results.values():
            result.worst = max(
                result.against_eager.get(k, result.seconds[k] / eager[k]) for k in timed
            )
            result.padding = padding_of(result, timed, weights)
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

    def eager(self, turn: Turn) -> Result:
        """The tower as it is."""
        return self._time(turn, grids_on=self.device, settling=1)

    def attached(
        self,
        turn: Turn,
        config: GraphConfig,
        prepare: Callable[[Handle], None] = lambda _: None,
    ) -> Result:
        """The tower with graphs."""
        # A graph comes with the first call that wants it, one of an exact size after some more.
        settling = _SETTLING_CALLS if config.exact_after else 2
        with attach(self.tower, config) as handle:
            prepare(handle)
            result = self._time(turn, CPU, settling, handle.stats)
            stats = handle.stats()
        result.graphs, result.graph_mib = len(stats.graphs), round(stats.graph_bytes / 2**20, 1)
        result.misses = {reason.name: n for reason, n in stats.misses.items()}
        return result

    def usual_budgets(self, kinds: Sequence[Kind]) -> tuple[int, ...]:
        """Powers of two for the items of these calls, up to what mmgraph captures by default."""
        items = [t * h * w for kind in kinds for t, h, w in kind]
        return power_of_two_budgets(min(items), max(min(16384, 4 * max(items)), max(items)))

    def usual(self, turn: Turn, **config: Any) -> Result:
        """Powers of two."""
        budgets = self.usual_budgets(turn.kinds)

        def prepare(handle: Handle) -> None:
            plan_as_usual(handle, budgets, [self._call(kind, CPU) for kind in turn.kinds])

        settings = GraphConfig(
            token_budgets=budgets,
            max_graphs=len(budgets),
            max_items=max(1, min(8, budgets[-1] // 4)),
            **_USUAL,
            **config,
        )
        return self.attached(turn, settings, prepare)


def _as_few(bench: Bench, turn: Turn) -> Result:
    return _fitted(bench, turn, len(bench.usual_budgets(turn.kinds)))


def _fitted(bench: Bench, turn: Turn, number: int = _FITTED) -> Result:
    config: Any = bench.tower.config
    budgets = fitted_budgets(turn.counts, number, config.spatial_merge_size**2)
    items = max(1, min(8, budgets[-1] // 4))
    config = GraphConfig(token_budgets=budgets, max_graphs=number, max_items=items, exact_after=0)
    return bench.attached(turn, config)


WAYS: dict[str, Callable[[Bench, Turn], Result]] = {
    "eager": Bench.eager,
    "usual": lambda bench, turn: bench.usual(turn, **_PLAIN),
    "usual, our kernels": Bench.usual,
    "mmgraph, as few": _as_few,
    "mmgraph, fitted": _fitted,
    "mmgraph": lambda bench, turn: bench.attached(turn, bench.config),
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
