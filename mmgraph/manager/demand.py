"""How much each graph is asked for, and which one has to give way to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from mmgraph.types import GraphKey

__all__ = ["Demand"]

_HALF_LIFE = 1000
"""Calls after which a use counts half."""

_REMEMBERED = 4096
_ASKED_BEFORE_OTHERS_GO = 4
_CLEARLY = 2.0
_SIGMA = 3.0
"""Standard deviations of a count of independent uses, beyond which a difference is no chance."""


class Demand:
    """Counts uses of graphs and wishes for those that there aren't; old ones count less.

    Sizes that take turns must not free each other's graphs, each at the cost of a capture. So one
    gives way only to another that is clearly more useful, and one that had to go must be asked for
    twice as often as before to come back.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._scores: dict[GraphKey, tuple[float, int]] = {}
        self._evictions: dict[GraphKey, int] = {}

    def call(self) -> None:
        """Count a call."""
        self.calls += 1

    def add(self, key: GraphKey) -> None:
        """Count a use of `key`, or a wish for it."""
        self._scores[key] = (self.of(key) + 1.0, self.calls)
        if len(self._scores) > _REMEMBERED:
            for old in sorted(self._scores, key=self.of)[: _REMEMBERED // 4]:
                del self._scores[old]

    def of(self, key: GraphKey) -> float:
        """How often `key` was used or wished for, lately."""
        score, then = self._scores.get(key, (0.0, self.calls))
        return float(score * 0.5 ** ((self.calls - then) / _HALF_LIFE))

    def wanted(self, key: GraphKey, min_hits: int, more: int = 0) -> bool:
        """Whether `key` was asked for often enough to be captured, with as many wishes `more`."""
        return self.of(key) + more > min_hits * 2 ** self._evictions.get(key, 0) - 0.5

    def victim(
        self, key: GraphKey, graphs: Collection[GraphKey], saving: Callable[[GraphKey], float]
    ) -> GraphKey | None:
        """The least useful of `graphs`, if `key` is clearly more useful.

        Args:
            key: What is to be captured.
            graphs: What there is.
            saving: What a use of each of these saves, in one unit.
        """
        asked = self.of(key)
        if not graphs or asked < _ASKED_BEFORE_OTHERS_GO - 0.5:
            return None
        least = min(graphs, key=lambda graph: self.of(graph) * saving(graph))
        worth = self.of(least) * saving(least)
        return least if asked * saving(key) > _CLEARLY * worth else None

    def is_clearly_more(
        self, key: GraphKey, graph: GraphKey, saving: Callable[[GraphKey], float]
    ) -> bool:
        """Whether `key` is more useful than `graph`, and not just lately by chance.

        Among many sizes that are asked for alike there are always some whose last uses are many,
        and some whose are few: these must not take each other's place for ever.
        """
        asked, used = self.of(key), self.of(graph)
        least = asked - _SIGMA * asked**0.5
        return least * saving(key) > (used + _SIGMA * used**0.5) * saving(graph)

    def evicted(self, keys: Iterable[GraphKey]) -> None:
        """Note that the graphs of `keys` had to go."""
        for key in keys:
            self._scores.pop(key, None)
            self._evictions[key] = self._evictions.get(key, 0) + 1
        while len(self._evictions) > _REMEMBERED:
            del self._evictions[next(iter(self._evictions))]
