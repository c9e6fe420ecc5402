"""What ``scripts.bench_traces`` is given for a trace, and what it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from math import prod
from random import Random
from typing import Any

from mmgraph.policy import as_replays, fit
from mmgraph.stats import EncoderStats
from scripts.traces import Grid

__all__ = [
    "Kind",
    "Result",
    "by_kind",
    "facts_of",
    "fitted_budgets",
    "in_turn",
    "is_frequent",
    "tokens_of",
    "total_of",
    "weights_of",
]

Kind = tuple[Grid, ...]
"""The grids of a call."""

_FREQUENT = 3
"""How often a kind occurs in a trace, at least, to be one of the frequent ones."""


@dataclass
class Result:
    """One way on one trace.

    Attributes:
        seconds: Of each kind of call that was timed.
        tokens: Tokens that graphs computed for each while it was timed, and how many were padding.
        graphs: How many there are in the end.
        graph_mib: Device memory of these.
        settling_s: What calls took that weren't timed, captures included.
        misses: Items in eager mode by reason, settling included.
        padding: Of the tokens that graphs compute for the calls of the trace that every way was
            timed on, the part that is padding.
        worst: The kind of call that does worst against eager mode: its time in multiples of that.
    """

    seconds: dict[Kind, float] = field(default_factory=dict)
    tokens: dict[Kind, tuple[int, int]] = field(default_factory=dict)
    graphs: int = 0
    graph_mib: float = 0.0
    settling_s: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    padding: float = 0.0
    worst: float = 1.0

    def count(self, stats: EncoderStats) -> None:
        """Take in the counters of the encoder as they are in the end."""
        self.graphs, self.graph_mib = len(stats.graphs), round(stats.graph_bytes / 2**20, 1)
        self.misses = {reason.name: n for reason, n in stats.misses.items()}
        self.settling_s = round(self.settling_s, 3)

    def judge(self, weights: Mapping[Kind, float], eager: Result) -> None:
        """Compare with eager mode, and say what of the calls that kinds stand for was padding."""
        computed = sum(weight * self.tokens[kind][0] for kind, weight in weights.items())
        padding = sum(weight * self.tokens[kind][1] for kind, weight in weights.items())
        self.padding = padding / max(1, computed)
        self.worst = max(self.seconds[kind] / eager.seconds[kind] for kind in weights)


def is_frequent(count: int) -> bool:
    """Whether a kind that occurs so often is made before it is timed."""
    return count >= _FREQUENT


def in_turn(counts: Counter[Kind]) -> list[Kind]:
    """Frequent kinds, the most frequent first, and rare ones in an order by chance, in turn."""
    frequent = [kind for kind, count in counts.most_common() if is_frequent(count)]
    rare = sorted(kind for kind, count in counts.items() if not is_frequent(count))
    Random(0).shuffle(rare)
    pairs = chain.from_iterable(zip_longest(frequent, rare))
    return [kind for kind in pairs if kind is not None]


def weights_of(timed: Sequence[Kind], counts: Counter[Kind]) -> dict[Kind, float]:
    """How many calls each kind stands for: its own, and its part of those of its sort not timed."""
    weights = {}
    for sort in (True, False):
        total = sum(count for count in counts.values() if is_frequent(count) is sort)
        kinds = [kind for kind in timed if is_frequent(counts[kind]) is sort]
        scale = total / max(1, sum(counts[kind] for kind in kinds))
        weights.update({kind: counts[kind] * scale for kind in kinds})
    return weights


def total_of(seconds: Mapping[Kind, float], weights: Mapping[Kind, float]) -> float:
    """Seconds of all calls that kinds stand for."""
    return sum(weight * seconds[kind] for kind, weight in weights.items())


def tokens_of(kind: Kind) -> int:
    """Tokens of all images of a call."""
    return sum(t * h * w for t, h, w in kind)


def facts_of(result: Result) -> dict[str, Any]:
    """A result without what was found for each kind of call."""
    data = asdict(result)
    del data["seconds"], data["tokens"]
    return data


def by_kind(
    timed: Sequence[Kind], weights: Mapping[Kind, float], results: Mapping[str, Result]
) -> list[dict[str, Any]]:
    """For each kind that was timed what it stands for, and what each way took."""
    return [
        {
            "grids": [list(grid) for grid in kind],
            "stands_for": round(weights[kind], 2),
            "ms": {way: round(1e3 * result.seconds[kind], 4) for way, result in results.items()},
        }
        for kind in timed
    ]


def fitted_budgets(counts: Mapping[Kind, int], number: int, granularity: int) -> tuple[int, ...]:
    """What ``mmgraph plan`` makes of a whole trace: ascending budgets, in tokens."""
    calls, items = Counter[int](), Counter[int]()
    for kind, count in counts.items():
        calls[tokens_of(kind)] += count
        for grid in kind:
            items[prod(grid)] += count
    largest = max(items)
    sizes = as_replays(calls, items, largest)
    return fit(sizes, number, granularity=granularity, largest=largest)
