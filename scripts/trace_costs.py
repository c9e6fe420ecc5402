"""What plans would cost on ``scripts.traces``, by a simple model of an H200's times; no GPU.

    python -m scripts.trace_costs --out docs/benchmarks/DATE-MACHINE

Every call of a trace is planned in its order by mmgraph's own planner, which captures and frees
graphs as it would while serving. Only what it would measure is made up (`TIMES`): something fixed,
something for each token of the budget, and something for each square of a segment's length. The
model is coarse. It is there to try other plans with, and says which are better before a GPU does;
what they are worth is for ``scripts.bench_traces`` to say.

Costs are relative to one graph for each call of exactly its tokens with dense attention. Writes
costs.json and costs.md. Captures are those in the round that counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from mmgraph import EncoderBatch, GraphConfig, GraphKey, attach
from mmgraph.errors import CaptureError
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.manager.capture import Entry
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Plan
from mmgraph.manager.plans import Plans
from mmgraph.manager.prices import PER_REPLAY
from mmgraph.manager.slopes import Slope
from mmgraph.manager.store import GraphStore
from mmgraph.manager.upfront import UpFront
from mmgraph.recipes import load_recipe
from scripts.bench_traces import usual_budgets
from scripts.files import write_rows
from scripts.traces import TRACES, make_trace
from scripts.traces_records import Kind, fitted_budgets, tokens_of
from scripts.usual_planner import usual_planner

__all__ = ["TIMES", "Times", "main", "rows"]

_COLUMNS = (
    "family",
    "trace",
    "way",
    "cost",
    "usual / it",
    "padding",
    "graphs",
    "captures",
    "in eager mode",
)
_FITTED = 16


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds on an H200, read off docs/benchmarks/2026-12-01-h200 (traces, commit f87b29f).

    Attributes:
        fixed: Of a replay, whatever its size.
        token: Of a replay for each token of its budget.
        dense: For each square of a segment's length where segments are of one length.
        varlen: The same in any other graph.
        eager: Of a call in eager mode: at least, fixed, for each token, for each square.
    """

    fixed: float
    token: float
    dense: float
    varlen: float
    eager: tuple[float, float, float, float]

    def of_replay(self, key: GraphKey, squares: int) -> float:
        """Of a replay."""
        square = self.dense if key.uniform and key.uniform[0] else self.varlen
        return self.fixed + self.token * key.token_budget + square * squares

    def of_eager(self, tokens: int, squares: int) -> float:
        """Of a call in eager mode."""
        least, fixed, token, square = self.eager
        return max(least, fixed + token * tokens + square * squares)

    def least(self, tokens: int, squares: int) -> float:
        """Of one graph for just this call."""
        return self.fixed + self.token * tokens + self.dense * squares


TIMES = {
    "qwen2_5_vl": Times(0.95, 2.56e-3, 4.3e-8, 4.3e-8, (30.0, 8.0, 21.5e-3, 0.0)),
    "qwen3_vl": Times(0.6, 1.7e-3, 3.8e-7, 5.8e-7, (16.0, 8.0, 2.97e-3, 3.9e-7)),
}


class _Nothing:
    """Stands for a graph."""

    num_bytes = 0

    def close(self) -> None:
        """Free nothing."""


class _Store(GraphStore):
    """Captures nothing, and knows by the model what it would have measured."""

    times: Times
    captures = 0

    def capture(self, key: GraphKey) -> CaptureError | None:
        self.captures += 1
        squares, signature = _squares_of(key), key.signature
        replay = self.times.of_replay(key, squares)
        eager = self.times.of_eager(key.token_budget, squares)
        entry = Entry(cast(Any, _Nothing()), cast(Any, None), cast(Any, None), 0.0)
        entry.replay_seconds = 1e-3 * replay
        self.entries[key], self._squares[key], self._measured = entry, squares, None
        known = self.eager_times.seconds.setdefault(signature, {})
        known.setdefault(self._facts.min_tokens, 1e-3 * self.times.of_eager(0, 0))
        known.setdefault(key.token_budget, 1e-3 * eager)
        if eager < 3 * replay:
            self.eager_times.alike[key] = key.token_budget, 1e-3 * eager
        for slopes, slope in (
            (self._slopes, self.times.varlen),
            (self.eager_times.slopes, self.times.eager[3]),
        ):
            slopes.setdefault(signature, Slope()).add(slope * 1e6, 10**9)
        return None

    def seconds(self, key: GraphKey) -> float:
        return 1e-3 * self.times.of_replay(key, _squares_of(key))


def _squares_of(key: GraphKey) -> int:
    """Of segments that fill a graph, each as long as may be."""
    longest = min(key.max_seqlen[0], key.token_budget)
    whole, rest = divmod(key.token_budget, longest)
    return whole * longest**2 + rest**2


class _Service:
    """Serves calls in one way.

    Attributes:
        cost: Milliseconds of the calls that count.
        least: The same in a graph for each.
        computed: Tokens that replays computed for them.
        padding: How many of these were padding.
        in_eager: Items in eager mode.
        captures: Made while they came.
    """

    def __init__(self, times: Times, manager: EncoderCudaGraphManager, config: GraphConfig) -> None:
        manager.backend.is_timed = True
        budgets, facts = manager.budgets, manager.facts
        self._times = times
        self.store = _Store(manager.model, facts, manager.backend, torch.device("cpu"), budgets[-1])
        self.store.times = times
        planner = Planner(budgets, uniform=True)
        upfront = UpFront(config, facts, planner, self.store, manager._lock)
        self.plans = Plans(
            config, planner, self.store, upfront.keys_of, lambda: None, lambda _: None
        )
        self.cost = self.least = 0.0
        self.computed = self.padding = self.in_eager = self.captures = 0

    def run(self, batches: Sequence[EncoderBatch], *, counts: bool) -> None:
        """Serve these calls, in their order."""
        before = self.store.captures
        for batch in batches:
            plan = self.plans.ready(batch)
            if plan is None:
                plan = self.plans.plan(batch)
            else:
                self.plans.used(batch)
            if counts:
                self._count(batch, plan)
        self.captures += counts * (self.store.captures - before)

    def _count(self, batch: EncoderBatch, plan: Plan) -> None:
        def held(items: Sequence[int]) -> tuple[int, int]:
            some = [batch.items[i] for i in items]
            return sum(item.num_tokens for item in some), sum(item.squares for item in some)

        self.least += self._times.least(*held(range(len(batch.items))))
        for replay in plan.replays:
            tokens, squares = held(replay.items)
            self.cost += 1e3 * PER_REPLAY + self._times.of_replay(replay.key, squares)
            self.computed += replay.key.token_budget
            self.padding += replay.key.token_budget - tokens
        for part in plan.eager:
            self.cost += self._times.of_eager(*held(part.items))
            self.in_eager += len(part.items)


def _ways(counts: Counter[Kind], merge: int) -> dict[str, GraphConfig]:
    powers = usual_budgets(counts)
    few = len(powers)

    def fitted(number: int, graphs: int) -> GraphConfig:
        budgets = fitted_budgets(counts, number, merge**2)
        return _config(budgets, max_graphs=graphs, exact_after=8 * (graphs > number))

    return {
        "usual": _config(powers, max_graphs=few, exact_after=0),
        "mmgraph, as few": fitted(few, few),
        "mmgraph, fitted": fitted(_FITTED // 2, _FITTED),
        "mmgraph, 32 graphs": GraphConfig(max_graphs=32, backend="trace"),
        "mmgraph": GraphConfig(backend="trace"),
    }


def _config(budgets: tuple[int, ...], **more: Any) -> GraphConfig:
    items = max(1, min(8, budgets[-1] // 4))
    return GraphConfig(token_budgets=budgets, max_items=items, backend="trace", **more)


@torch.no_grad()
def rows(
    families: Sequence[str], traces: Sequence[str], calls: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """What each way costs on each trace, the last time of several that it comes."""
    for family in families:
        tower = load_recipe(f"{family}:tiny").build_encoder(device="cpu", dtype=torch.float32)
        config: Any = tower.config
        merge = config.spatial_merge_size
        width = 3 * config.temporal_patch_size * config.patch_size**2
        for name in traces:
            trace, usual = make_trace(name, family, calls=calls).calls, 0.0
            for way, settings in _ways(Counter(trace), merge).items():
                with attach(tower, settings) as handle:
                    (manager,) = handle._managers()
                    service = _Service(TIMES[family], manager, settings)
                    batches = [manager.model.item_specs(_call(kind, width)) for kind in trace]
                    if way == "usual" and settings.token_budgets:
                        service.plans._planner = usual_planner(settings.token_budgets, batches)
                    for nth in range(rounds):
                        service.run(batches, counts=nth == rounds - 1)
                usual = usual or service.cost
                values = (
                    family,
                    name,
                    way,
                    round(service.cost / service.least, 3),
                    round(usual / service.cost, 3),
                    f"{service.padding / max(1, service.computed):.1%}",
                    len(service.store.entries),
                    service.captures,
                    service.in_eager,
                )
                yield dict(zip(_COLUMNS, values, strict=True))


def _call(kind: Kind, width: int) -> dict[str, torch.Tensor]:
    patches = torch.empty(1, width).expand(tokens_of(kind), width)
    return {"hidden_states": patches, "grid_thw": torch.tensor(kind)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the traces and write what that costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--families", nargs="+", choices=list(TIMES), default=list(TIMES))
    add("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    add("--calls", type=int, default=500, help="of each trace")
    add("--rounds", type=int, default=2, help="how often each trace comes; the last time counts")
    add("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = list(rows(options.families, options.traces, options.calls, options.rounds))
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = f"python -m scripts.trace_costs {given}"
    write_rows(options.out, "costs", "Traces by a model of the times", command, found)


if __name__ == "__main__":
    main()
