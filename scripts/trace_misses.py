"""What runs in eager mode on ``scripts.traces`` with as many graphs as budgets fitted to them.

    python -m scripts.trace_misses --graphs 7 16 --out docs/benchmarks/DATE-MACHINE

Needs no GPU: a tiny tower serves the calls, in their order, from recordings (``backend="trace"``),
so that nothing is timed and every call that finds a graph is served by it. Grids are `--shrink`
times smaller on each side. Writes misses.json and misses.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mmgraph import GraphConfig, attach
from mmgraph.recipes import load_recipe
from scripts.files import write_rows
from scripts.traces import make_trace
from scripts.traces_records import Kind, fitted_budgets, tokens_of

__all__ = ["main", "rows"]

_TRACES = ("photos", "documents", "chat")
_FAMILY = "qwen2_5_vl"
_COLUMNS = ("trace", "graphs", "items", "in eager mode", "replays", "padding", "evictions")


@torch.no_grad()
def rows(graphs: Sequence[int], calls: int, shrink: int) -> Iterator[dict[str, Any]]:
    """What became of the first `calls` calls of each trace, for each number of graphs."""
    tower = load_recipe(f"{_FAMILY}:tiny").build_encoder(device="cpu", dtype=torch.float32)
    config: Any = tower.config
    merge, width = config.spatial_merge_size, 3 * config.temporal_patch_size * config.patch_size**2
    for number in graphs:
        for name in _TRACES:
            kinds = [_shrunk(call, shrink, merge) for call in make_trace(name, _FAMILY).calls]
            budgets = fitted_budgets(Counter(kinds), number, merge**2)
            settings = GraphConfig(
                token_budgets=budgets,
                max_graphs=number,
                max_items=max(1, min(8, budgets[-1] // 4)),
                exact_after=0,
                backend="trace",
            )
            with attach(tower, settings) as handle:
                for kind in kinds[:calls]:
                    patches = torch.randn(tokens_of(kind), width)
                    tower(hidden_states=patches, grid_thw=torch.tensor(kind))
                stats = handle.stats()
            computed = max(1, stats.tokens + stats.padding)
            values = (
                name,
                number,
                stats.items,
                sum(stats.misses.values()),
                stats.replays,
                f"{stats.padding / computed:.1%}",
                stats.evictions,
            )
            yield dict(zip(_COLUMNS, values, strict=True))


def _shrunk(call: Kind, shrink: int, merge: int) -> Kind:
    def side(patches: int) -> int:
        return max(merge, patches // shrink // merge * merge)

    return tuple((t, side(h), side(w)) for t, h, w in call)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the traces and write what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=int, nargs="+", default=[7, 16])
    parser.add_argument("--calls", type=int, default=300, help="of each trace")
    parser.add_argument("--shrink", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = list(rows(options.graphs, options.calls, options.shrink))
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = f"python -m scripts.trace_misses {given}"
    write_rows(options.out, "misses", "Traces with few graphs", command, found)


if __name__ == "__main__":
    main()
