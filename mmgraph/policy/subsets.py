"""The cheapest division of a few items over replays: dynamic programming over their subsets.

A division of some items is a replay that holds the largest of them and a division of the rest, so
each subset's cheapest division follows from those of its own subsets. All subsets with the same
largest item are settled in four array operations. A subset is a number: bit `i` is item `i`, and
items ascend.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT_ITEMS", "divide_exactly"]

EXACT_ITEMS = 12
_Indices = npt.NDArray[np.intp]
_Costs = npt.NDArray[np.float64]


class _Scratch(threading.local):
    """Memory of a thread: to allocate it each time takes as long as the arithmetic."""

    def __init__(self) -> None:
        self.first, self.rest = np.empty((2, 3 ** (EXACT_ITEMS - 2)))


_scratch = _Scratch()


def divide_exactly(
    sizes: Sequence[int],
    budgets: Sequence[int],
    prices: Sequence[float],
    own: Sequence[float] = (),
    whole: float | None = None,
) -> list[tuple[int, ...]]:
    """Divide items over replays at the least cost there is.

    Args:
        sizes: Tokens of each item, none above the largest budget; `EXACT_ITEMS` at most: each one
            more takes three times as long.
        budgets: Ascending budgets in tokens.
        prices: Cost of a replay of each, ascending.
        own: Cost of each item in a graph of its own, infinity where it has none; or nothing.
        whole: Cost of one replay of all items, if that is known better than by its budget.

    Returns:
        The positions of the items that lie in each replay.
    """
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    alone = _alone([sizes[i] for i in order], budgets, prices)
    for i, item in enumerate(order) if own else ():
        alone[1 << i] = min(alone[1 << i], own[item])
    if whole is not None:
        alone[-1] = whole
    last = len(order) - 1
    cheapest = np.zeros(1 << last)  # of each subset without the largest item
    parts, others, starts = _pairs()
    for k in range(last):
        subsets, pairs = 1 << k, 3**k
        first, rest = _scratch.first[:pairs], _scratch.rest[:pairs]
        # mode="clip" writes to `out` without a copy; the indices are in range.
        alone[subsets : 2 * subsets].take(parts[:pairs], out=first, mode="clip")
        cheapest.take(others[:pairs], out=rest, mode="clip")
        np.add(first, rest, out=first)
        np.minimum.reduceat(first, starts[:subsets], out=cheapest[subsets : 2 * subsets])
    return [tuple(order[i] for i in items) for items in _replays(len(order), alone, cheapest)]


def _alone(items: list[int], budgets: Sequence[int], prices: Sequence[float]) -> _Costs:
    """What one replay costs that holds the items of each subset, infinity if none can."""
    sums = np.zeros(1, dtype=np.int64)
    for size in items:
        sums = np.concatenate((sums, sums + size))
    costs: _Costs = np.append(prices, np.inf)
    return costs[np.searchsorted(budgets, sums)]


def _replays(number: int, alone: _Costs, cheapest: _Costs) -> Iterator[tuple[int, ...]]:
    """Follow the cheapest divisions from the set of all items down to nothing."""
    inner, _, starts = _pairs()
    left, parts = (1 << number) - 1, np.arange(len(cheapest))
    while left:
        largest = 1 << left.bit_length() - 1
        below = left ^ largest
        if below < len(cheapest) - 1:
            start = starts[below]
            parts = inner[start : start + (1 << below.bit_count())]
        first = parts | largest
        replay = int(first[np.argmin(alone[first] + cheapest[below ^ parts])])
        yield tuple(i for i in range(number) if replay >> i & 1)
        left ^= replay


@lru_cache(maxsize=1)
def _pairs() -> tuple[_Indices, _Indices, _Indices]:
    """Pairs of a subset and one of its subsets, ordered by the former.

    Returns:
        The inner subset of each pair, what it leaves of the outer one, and where the pairs of each
        outer subset start.
    """
    inner = [np.zeros(1, dtype=np.intp)]
    for i in range(EXACT_ITEMS - 2):
        inner += [np.concatenate((subsets, subsets | 1 << i)) for subsets in inner]
    counts = [len(subsets) for subsets in inner]
    parts = np.concatenate(inner)
    starts = np.cumsum([0, *counts[:-1]], dtype=np.intp)
    return parts, np.repeat(np.arange(len(inner)), counts) ^ parts, starts
