"""The cheapest division of items over replays: depth first, with a bound that is hard to beat.

What the rest costs at least is known as if items were liquid; with items of many sizes the best
division comes close to that bound. Four more observations keep the search short. The largest item
left lies in some replay, so that one is filled next. A replay that has room for a further item may
as well take it, since no other one gets dearer by that. Which sums items can make is known from a
bit set, so no choice leads into a dead end. And where one more replay takes all that is left, the
fullest filling of the first is the best one, so that two replays need no search at all.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from math import gcd, inf

__all__ = ["PriceList", "divide", "price_list"]

_Sizes = tuple[int, ...]
_MAX_POINTS = 1024
_WORTH = 1 - 1e-3


class _Liquid:
    """The least cost of replays that hold any number of tokens; costs are found as asked for."""

    def __init__(self, budgets: Sequence[int], prices: Sequence[float], at_first: int) -> None:
        self._budgets, self._prices = budgets, prices
        self._capacities: list[int] = []
        self._costs: list[float] = []
        self._per_token = min((p / b for b, p in zip(budgets, prices, strict=True)), default=0.0)
        self._next: list[tuple[float, int]] = [
            (sum(prices[i] for i in chosen), -sum(budgets[i] for i in chosen))
            for chosen in combinations_with_replacement(range(len(budgets)), at_first)
        ]
        heapq.heapify(self._next)

    def __call__(self, tokens: int) -> float:
        """Cost of `tokens` tokens at least."""
        capacities = self._capacities
        if not capacities or tokens > capacities[-1]:
            if len(capacities) >= _MAX_POINTS:
                return max(self._costs[-1], tokens * self._per_token)
            self._extend(tokens)
            return self(tokens)
        return self._costs[bisect_left(capacities, tokens)]

    def _extend(self, tokens: int) -> None:
        """List what replays can hold, each with its least cost; both ascending."""
        capacities, costs, waiting = self._capacities, self._costs, self._next
        largest = capacities[-1] if capacities else 0
        while largest < tokens and len(capacities) < _MAX_POINTS:
            cost, negative = heapq.heappop(waiting)
            if -negative <= largest:
                continue  # something cheaper holds more, also with whatever is added to both
            largest = -negative
            capacities.append(largest)
            costs.append(cost)
            for budget, price in zip(self._budgets, self._prices, strict=True):
                heapq.heappush(waiting, (cost + price, negative - budget))


class PriceList:
    """Budgets with what a replay of each costs.

    Args:
        budgets: Ascending budgets in tokens.
        prices: Cost of a replay of each, positive.

    Attributes:
        budgets: Those of them that are worth it: no larger one is as cheap. Ascending.
        prices: Cost of a replay of each of these, ascending.
        of_some: Cost of one replay or more that hold some tokens, at least.
        of_two: The same of two replays or more.
    """

    def __init__(self, budgets: Sequence[int], prices: Sequence[float]) -> None:
        worth: list[tuple[int, float]] = []
        for budget, price in sorted(zip(budgets, prices, strict=True), reverse=True):
            if not worth or price < worth[-1][1]:
                worth.append((budget, price))
        worth.reverse()
        self.budgets = [budget for budget, _ in worth]
        self.prices = [price for _, price in worth]
        self.of_some = _Liquid(self.budgets, self.prices, 1)
        self.of_two = _Liquid(self.budgets, self.prices, 2)

    def fit(self, tokens: int) -> int:
        """The position of the cheapest budget that holds `tokens`; their number if none does."""
        return bisect_left(self.budgets, tokens)

    def of(self, tokens: int) -> float:
        """Cost of the cheapest budget that holds `tokens`, which one must."""
        return self.prices[self.fit(tokens)]


@lru_cache(maxsize=64)
def price_list(budgets: tuple[int, ...], prices: tuple[float, ...]) -> PriceList:
    """A price list, remembered: its bounds are computed as they are asked for."""
    return PriceList(budgets, prices)


def divide(sizes: Sequence[int], prices: PriceList, limit: int) -> tuple[list[_Sizes], bool]:
    """Divide items over replays at the least cost.

    Args:
        sizes: Tokens of each item, none above the largest budget.
        prices: What there is to replay.
        limit: Fillings of a replay to look at, at most; the best division so far is returned.

    Returns:
        The sizes that lie in each replay, and whether it is certain that no other division is
        cheaper by more than a thousandth.
    """
    search = _Search(prices, limit, gcd(*sizes))
    search.run(tuple(sorted(sizes, reverse=True)), 0.0)
    return search.best, search.left >= 0


class _Search:
    def __init__(self, prices: PriceList, limit: int, unit: int) -> None:
        self.best: list[_Sizes] = []
        self.left = limit
        self._list = prices
        self._unit = unit
        self._cost = inf
        self._chosen: list[_Sizes] = []
        self._reached: dict[_Sizes, float] = {}

    def run(self, items: _Sizes, cost: float) -> None:
        """Divide `items`, which descend, where `cost` was spent on others before."""
        if self._reached.get(items, inf) <= cost:
            return
        self._reached[items] = cost
        prices, total = self._list.prices, sum(items)
        last = self._list.fit(total)
        if last < len(prices):
            self._found(cost + prices[last], items)
        at_least = cost + self._list.of_two(total)
        if len(items) == 1 or at_least >= self._cost:
            return
        fillings = _Fillings(items, self._unit)
        options = self._options(items, total, cost, last, fillings)
        for bound, i, top in sorted(options):
            if bound >= self._cost or self.left < 0:
                return
            self._fill(items, total, cost, i, top, fillings)

    def _options(
        self, items: _Sizes, total: int, cost: float, last: int, fillings: _Fillings
    ) -> list[tuple[float, int, int]]:
        """Budgets for the largest item, with what that costs at least and the fullest filling.

        Divisions into two replays are settled here.
        """
        prices, budgets, first = self._list.prices, self._list.budgets, items[0]
        fit, of_some, of_two = self._list.fit, self._list.of_some, self._list.of_two
        options = []
        for i in range(fit(first), min(last, len(prices))):
            spent = cost + prices[i]
            if spent + prices[0] >= self._cost:
                break
            if spent + of_some(total - budgets[i]) >= self._cost:
                continue
            top = fillings.fullest(budgets[i])
            rest = total - top
            other = fit(rest)
            if other < len(prices) and spent + prices[other] < self._cost:
                chosen, others = next(fillings.of(top))
                self._chosen.append(chosen)
                self._found(spent + prices[other], others)
                self._chosen.pop()
            bound = spent + of_two(rest)
            if bound < self._cost:
                options.append((bound, i, top))
        return options

    def _fill(
        self, items: _Sizes, total: int, cost: float, i: int, top: int, fillings: _Fillings
    ) -> None:
        """Try the fillings of budget `i`, the fullest first; three replays or more in all."""
        spent, of_two = cost + self._list.prices[i], self._list.of_two
        below = self._list.budgets[i - 1] if i else 0
        budget = self._list.budgets[i]
        filling = top
        while filling > below and spent + of_two(total - filling) < self._cost:
            for chosen, others in fillings.of(filling):
                self.left -= 1
                if self.left < 0:
                    return
                if filling + others[-1] <= budget:
                    continue  # has room for another
                self._chosen.append(chosen)
                self.run(others, spent)
                self._chosen.pop()
            filling = fillings.fullest(filling - 1)

    def _found(self, cost: float, last: _Sizes) -> None:
        if cost < self._cost:
            self._cost, self.best = cost * _WORTH, [*self._chosen, last]


class _Fillings:
    """What a replay of the first of `items`, which descend, and of others can hold."""

    def __init__(self, items: _Sizes, unit: int) -> None:
        self._items, self._unit = items, unit
        units = [size // unit for size in items]
        reach = [1]  # sums of the last ones, a bit a unit
        for size in reversed(units[1:]):
            reach.append(reach[-1] | (reach[-1] << size))
        reach.reverse()
        self._units, self._reach = units, reach

    def fullest(self, tokens: int) -> int:
        """The largest filling of at most `tokens`; 0 if there is none."""
        room = tokens // self._unit - self._units[0]
        if room < 0:
            return 0
        sums = self._reach[0] & ((2 << room) - 1)
        return (sums.bit_length() - 1 + self._units[0]) * self._unit

    def of(self, filling: int) -> Iterator[tuple[_Sizes, _Sizes]]:
        """Ways to make exactly `filling`, each with the sizes that are left, which descend."""
        items, units, reach = self._items, self._units, self._reach
        count, need = len(items), filling // self._unit - units[0]
        stack: list[tuple[int, int, _Sizes, _Sizes]] = [(1, need, items[:1], ())]
        while stack:
            i, need, chosen, others = stack.pop()
            while True:
                if not need:
                    yield chosen, others + items[i:]
                    break
                size = units[i]
                skip = i + 1
                while skip < count and units[skip] == size:
                    skip += 1  # of equal sizes the first are chosen
                without = (reach[skip - 1] >> need) & 1
                if size <= need and (reach[i] >> (need - size)) & 1:
                    if without:
                        stack.append((skip, need, chosen, others + items[i:skip]))
                    i, need, chosen = i + 1, need - size, chosen + items[i : i + 1]
                elif without:
                    i, others = skip, others + items[i:skip]
                else:
                    break
