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
from scripts.traces import Grid

__all__ = [
    "Kind",
    "Result",
    "Turn",
    "by_kind",
    "facts_of",
    "fitted_budgets",
    "in_turn",
    "is_frequent",
    "padding_of",
    "tokens_of",
    "weights_of",
]

Kind = tuple[Grid, ...]
"""The grids of a call."""

_FREQUENT = 3
"""How often a kind occurs in a trace, at least, to be one of the frequent ones."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a way has to do on a trace, and until when.

    Attributes:
        kinds: Kinds of call of the trace, the most frequent first, in the order of timing.
        counts: How often each occurs.
        reach: How many of them to time, at most: no more than the ways before did.
        start: When it began, by the clock of the bench.
        settled: When the calls before are over.
        end: When timing is.
        eager: Seconds of each kind in eager mode, for a way that is to be held against it.
    """

    kinds: Sequence[Kind]
    counts: Counter[Kind]
    reach: int
    start: float
    settled: float
    end: float
    eager: Mapping[Kind, float] = field(default_factory=dict)


@dataclass
class Result:
    """One way on one trace.

    Attributes:
        seconds: Of each kind of call that was timed.
        tokens: Tokens that graphs computed for each while it was timed, and how many were padding.
        graphs: How many there are in the end.
        graph_mib: Device memory of these.
        settling_s: What attaching and the calls before took, captures included.
        misses: Items in eager mode by reason, settling included.
        padding: Of the tokens that graphs compute for the calls of the trace that every way was
            timed on, the part that is padding.
        worst: The kind of call that does worst against eager mode: its time in multiples of that.
        against_eager: Multiples of eager mode's time of kinds that were timed in turn with it.
    """

    seconds: dict[Kind, float] = field(default_factory=dict)
    tokens: dict[Kind, tuple[int, int]] = field(default_factory=dict)
    graphs: int = 0
    graph_mib: float = 0.0
    settling_s: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    padding: float = 0.0
    worst: float = 1.0
    against_eager: dict[Kind, float] = field(default_factory=dict)


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


def padding_of(result: Result, timed: Sequence[Kind], weights: Mapping[Kind, float]) -> float:
    """The part of what graphs compute for these calls that is padding."""
    computed = sum(weights[kind] * result.tokens[kind][0] for kind in timed)
    padding = sum(weights[kind] * result.tokens[kind][1] for kind in timed)
    return padding / max(1, computed)


def tokens_of(kind: Kind) -> int:
    """Tokens of all images of a call."""
    return sum(t * h * w for t, h, w in kind)


def facts_of(result: Result) -> dict[str, Any]:
    """A result without what was found for each kind of call."""
    data = asdict(result)
    del data["seconds"], data["tokens"], data["against_eager"]
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
