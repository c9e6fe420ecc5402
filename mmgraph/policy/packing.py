"""Which items of a call are replayed together, and in which budget.

A replay costs what was measured for its budget or, before that, about its tokens plus something
fixed. Few large replays waste padding, many small ones waste the fixed part and the width of the
GPU. Up to `EXACT_ITEMS` items the division found is the cheapest there is. Of more items it is the
best one that a bounded search comes across, and never dearer than one replay for all items or one
for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mmgraph.policy.search import PriceList, divide, price_list
from mmgraph.policy.subsets import EXACT_ITEMS, divide_exactly

__all__ = ["EXACT_ITEMS", "Bin", "Packing", "pack"]

_MAX_FILLINGS = 24


@dataclass(frozen=True, slots=True)
class Bin:
    """Items that one replay serves.

    Attributes:
        items: Indices of the items, ascending.
        budget: The cheapest budget that holds them: the smallest, where costs rise with budgets.
    """

    items: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class Packing:
    """A division of a call's items.

    Attributes:
        bins: What is replayed; together with `oversized` each item occurs once.
        oversized: Indices of items above every budget.
    """

    bins: tuple[Bin, ...]
    oversized: tuple[int, ...]

    def cost(self, overhead: int) -> int:
        """Tokens computed, a replay counted as `overhead` tokens more."""
        return sum(b.budget + overhead for b in self.bins)


def pack(
    sizes: Sequence[int],
    budgets: Sequence[int],
    overhead: int = 256,
    *,
    prices: Sequence[float] | None = None,
) -> Packing:
    """Divide items of `sizes` tokens over replays of the ascending `budgets`.

    Args:
        sizes: Tokens of each item.
        budgets: Ascending budgets in tokens.
        overhead: What a further replay costs, in tokens, where no `prices` are given.
        prices: Cost of a replay of each budget, positive, in any unit.
    """
    largest = budgets[-1] if budgets else 0
    fitting = [i for i, size in enumerate(sizes) if size <= largest]
    oversized = tuple(i for i, size in enumerate(sizes) if size > largest)
    if not fitting:
        return Packing((), oversized)
    costs = [b + overhead for b in budgets] if prices is None else prices
    prices_ = price_list(tuple(budgets), tuple(costs))
    bins = _divided([sizes[i] for i in fitting], prices_)
    return Packing(_bins(bins, fitting, sizes, prices_), oversized)


def _divided(sizes: list[int], prices: PriceList) -> Sequence[Sequence[int]]:
    """The sizes that go together."""
    if len(sizes) == 1:
        return [sizes]
    if len(sizes) <= EXACT_ITEMS:
        return divide_exactly(sizes, prices.budgets, prices.prices)
    found, certain = divide(sizes, prices, _MAX_FILLINGS)
    if certain:
        return found
    alone = [[size] for size in sizes]
    return min(found, alone, key=lambda bins: sum(prices.of(sum(b)) for b in bins))


def _bins(
    bins: Sequence[Sequence[int]], fitting: list[int], sizes: Sequence[int], prices: PriceList
) -> tuple[Bin, ...]:
    """Give each size an item that has it, in the order of the call."""
    items: dict[int, deque[int]] = {}
    for i in fitting:
        items.setdefault(sizes[i], deque()).append(i)
    return tuple(
        Bin(
            tuple(sorted([items[size].popleft() for size in bin_])),
            prices.budgets[prices.fit(sum(bin_))],
        )
        for bin_ in bins
    )
