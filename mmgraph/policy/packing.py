"""Which items of a call are replayed together, and in which budget.

A replay costs what was measured for its budget or, before that, about its tokens plus something
fixed. Few large replays waste padding, many small ones waste the fixed part and the width of the
GPU. Up to `EXACT_ITEMS` items the division found is the cheapest there is. Of more items it is the
best one that a bounded search comes across, and never dearer than one replay for all items or one
for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from mmgraph.policy.search import PriceList, divide, price_list
from mmgraph.policy.subsets import EXACT_ITEMS, divide_exactly

__all__ = ["EXACT_ITEMS", "Bin", "Packing", "pack"]

_MAX_FILLINGS = 24


@dataclass(frozen=True, slots=True)
class Bin:
    """Items that one replay serves.

    Attributes:
        items: Indices of the items, ascending.
        budget: The cheapest budget that holds them: the smallest, where costs rise with budgets. Or
            the tokens of one item that has a graph of its own.
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
    own: Sequence[float] = (),
    whole: float | None = None,
) -> Packing:
    """Divide items of `sizes` tokens over replays of the ascending `budgets`.

    Args:
        sizes: Tokens of each item.
        budgets: Ascending budgets in tokens.
        overhead: What a further replay costs, in tokens, where no `prices` are given.
        prices: Cost of a replay of each budget, positive, in any unit.
        own: Cost of each item in a graph of exactly its tokens, infinity where it has none; or
            nothing. Such an item may be above every budget. The cost is below zero where something
            of the item that costs as much in every budget is left out of `prices`, and less of it
            falls due there.
        whole: Cost of a replay of all items in the smallest budget that holds them, where that is
            known better than by `prices`.
    """
    largest = budgets[-1] if budgets else 0
    fitting = [i for i, size in enumerate(sizes) if 0 < size <= largest]
    above = [i for i, size in enumerate(sizes) if size > largest or not budgets]
    bins = [Bin((i,), sizes[i]) for i in above if own and own[i] < inf]
    oversized = tuple(i for i in above if not (own and own[i] < inf))
    empty = [i for i, size in enumerate(sizes) if not size and budgets]
    if fitting:
        costs = [b + overhead for b in budgets] if prices is None else prices
        items = _Items(
            [sizes[i] for i in fitting],
            price_list(tuple(budgets), tuple(costs)),
            [own[i] for i in fitting] if own else (),
            _one_for_all(sum(sizes), budgets, costs, whole),
        )
        bins += [Bin(tuple(fitting[i] for i in b.items), b.budget) for b in items.bins()]
    if empty and not bins:
        bins.append(Bin((), budgets[0]))
    if empty:  # they are no bother to any replay
        bins[-1] = Bin(tuple(sorted((*bins[-1].items, *empty))), bins[-1].budget)
    return Packing(tuple(bins), oversized)


def _one_for_all(
    total: int, budgets: Sequence[int], costs: Sequence[float], whole: float | None
) -> tuple[float, int] | None:
    """Cost and budget of the cheapest replay of all items, if `whole` says more than `costs`."""
    fit = bisect_left(budgets, total)
    if whole is None or fit == len(budgets):
        return None
    return min([(whole, budgets[fit]), *zip(costs[fit + 1 :], budgets[fit + 1 :], strict=True)])


@dataclass(frozen=True, slots=True)
class _Items:
    """Items that some budget holds.

    Attributes:
        sizes: Tokens of each.
        prices: What there is to replay.
        own: Cost of each in a graph of its own, or nothing.
        together: Cost and budget of one replay for all, if those are known better.
    """

    sizes: list[int]
    prices: PriceList
    own: Sequence[float]
    together: tuple[float, int] | None

    def bins(self) -> list[Bin]:
        number = len(self.sizes)
        if number == 1:
            return [self._bin((0,))]
        if number > EXACT_ITEMS:
            return min(self._ways(), key=lambda bins: sum(map(self._cost, bins)))
        whole = None if self.together is None else self.together[0]
        prices = self.prices
        found = divide_exactly(self.sizes, prices.budgets, prices.prices, self.own, whole)
        return [self._bin(items) for items in found]

    def _ways(self) -> Iterator[list[Bin]]:
        """What a bounded search finds, and the obvious ways."""
        everything = tuple(range(len(self.sizes)))
        found, certain = self._divided(everything)
        yield found
        if self.own or not certain:
            yield [self._bin((i,)) for i in everything]
        if self.together is not None:
            yield [self._bin(everything)]
        if self.own:
            rate = min(p / b for b, p in zip(self.prices.budgets, self.prices.prices, strict=True))
            for worth in (lambda size: rate * size, self.prices.of):
                own = [i for i in everything if self.own[i] < worth(self.sizes[i])]
                others = tuple(i for i in everything if i not in own)
                if own:
                    yield [*map(self._bin, zip(own)), *(self._divided(others)[0] if others else ())]

    def _divided(self, items: tuple[int, ...]) -> tuple[list[Bin], bool]:
        sizes = [self.sizes[i] for i in items]
        found, certain = divide(sizes, self.prices, _MAX_FILLINGS)
        of_size: dict[int, deque[int]] = {}
        for i in items:
            of_size.setdefault(self.sizes[i], deque()).append(i)
        bins = [self._bin([of_size[size].popleft() for size in sizes]) for sizes in found]
        return bins, certain

    def _bin(self, items: Sequence[int]) -> Bin:
        items, total = tuple(sorted(items)), sum([self.sizes[i] for i in items])
        if len(items) == len(self.sizes) and self.together is not None:
            return Bin(items, self.together[1])
        fit = self.prices.fit(total)
        if self.own and len(items) == 1 and self.own[items[0]] < self.prices.prices[fit]:
            return Bin(items, total)
        return Bin(items, self.prices.budgets[fit])

    def _cost(self, bin_: Bin) -> float:
        if len(bin_.items) == len(self.sizes) and self.together is not None:
            return self.together[0]
        cost = self.prices.of(sum([self.sizes[i] for i in bin_.items]))
        return min(cost, self.own[bin_.items[0]]) if self.own and len(bin_.items) == 1 else cost
