"""Ladders of budgets fitted to observed sizes: the least expected cost, by dynamic programming.

A call of n tokens is replayed in the smallest budget that holds it, and costs what that budget
costs; above the ladder it runs in eager mode. Costs never fall with the size, so some best ladder
has its budgets at observed sizes, and the best one of k budgets that ends at size j is

    best[k][j] = min over i < j of best[k-1][i] + replay(j) * (calls above i, up to j)

For a fixed i that is a line in replay(j), and both slopes and queries come in order: a queue of
the lines that can still be lowest answers all j in one pass. K budgets for n distinct sizes take
O(K n) steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mmgraph.policy.budgets import smallest_fit

__all__ = ["EAGER", "REPLAY", "Cost", "Expectation", "LinearCost", "as_replays", "expect", "fit"]

Cost = Callable[[int], float]
"""What a call costs, given the tokens computed; in any unit, and never falling with the tokens."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A cost that grows with the tokens, in the time of a token.

    Attributes:
        fixed: What a call costs however small it is.
        per_token: What each token adds; not negative.
    """

    fixed: float
    per_token: float = 1

    def __call__(self, tokens: int) -> float:
        """The cost of a call of `tokens` tokens."""
        return self.fixed + self.per_token * tokens


REPLAY = LinearCost(256)
"""A replay, as ``pack`` sees it."""

EAGER = LinearCost(4096)
"""Eager mode: launching its kernels takes about as long as some thousand tokens take the GPU."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a ladder does to given sizes.

    Attributes:
        calls: Number of calls.
        above: Those of them that are larger than every budget.
        tokens: Real tokens of the others.
        computed: Tokens of the budgets that the others take.
        cost: Cost of all calls.
    """

    calls: int
    above: int
    tokens: int
    computed: int
    cost: float

    @property
    def padding(self) -> float:
        """Share of the computed tokens that belong to no item."""
        return 1 - self.tokens / self.computed if self.computed else 0.0

    @property
    def share_above(self) -> float:
        """Share of the calls that are larger than every budget."""
        return self.above / self.calls if self.calls else 0.0


def expect(
    sizes: Mapping[int, int],
    budgets: Sequence[int],
    *,
    replay: Cost = REPLAY,
    eager: Cost = EAGER,
) -> Expectation:
    """Return what calls of `sizes` cost on a ladder.

    Args:
        sizes: Number of calls by tokens.
        budgets: Ascending budgets in tokens.
        replay: Cost of a replay of a budget.
        eager: Cost of a call in eager mode.
    """
    above, tokens, computed, cost = 0, 0, 0, 0.0
    for size, count in sizes.items():
        budget = smallest_fit(budgets, size)
        if budget is None:
            above += count
            cost += count * eager(size)
        else:
            tokens += count * size
            computed += count * budget
            cost += count * replay(budget)
    return Expectation(sum(sizes.values()), above, tokens, computed, cost)


def as_replays(calls: Mapping[int, int], items: Mapping[int, int], largest: int) -> Counter[int]:
    """Return the sizes of the replays that calls of several items take, as packing divides them.

    A call above `largest` is divided into replays that are full and one for the rest, unless it is
    a lone item of that size, which nothing can divide.

    Args:
        calls: Number of calls by their total tokens.
        items: Number of items by their tokens.
        largest: The largest budget there may be, in tokens.
    """
    sizes: Counter[int] = Counter()
    for total, count in calls.items():
        alone = count if total <= largest else min(count, items.get(total, 0))
        divided = count - alone
        sizes[total] += alone
        sizes[largest] += divided * (total // largest)
        sizes[total % largest] += divided
    return Counter({size: count for size, count in sizes.items() if size and count})


def fit(
    sizes: Mapping[int, int],
    count: int,
    *,
    granularity: int = 1,
    largest: int | None = None,
    required: Collection[int] = (),
    replay: Cost = REPLAY,
    eager: Cost = EAGER,
) -> tuple[int, ...]:
    """Return the ladder of at most `count` budgets with the least cost for `sizes`.

    No other ladder costs less; of two that cost the same, the one with fewer budgets is returned.

    Args:
        sizes: Number of calls by tokens.
        count: Budgets there may be, at least 1.
        granularity: Budgets are multiples of this.
        largest: The largest budget allowed, in tokens; the sizes above it run in eager mode.
            ``None`` allows any.
        required: Budgets that the ladder must hold, whatever they are worth.
        replay: Cost of a replay of a budget; must not fall with its tokens.
        eager: Cost of a call above the ladder.

    Returns:
        Ascending budgets; none where eager mode is as cheap for all, and none is required.

    Raises:
        ValueError: An argument is out of range, or a larger budget costs less than a smaller one.
    """
    _check(sizes, count, granularity, largest, required)
    calls: Counter[int] = Counter(dict.fromkeys(required, 0))
    by_size: dict[int, list[int]] = {}
    for size, number in sizes.items():
        budget = -(-size // granularity) * granularity
        if number and (largest is None or budget <= largest):
            calls[budget] += number
            by_size.setdefault(budget, []).append(size)
    budgets = sorted(calls)
    prices = [replay(budget) for budget in budgets]
    if any(a > b for a, b in pairwise(prices)):
        raise ValueError("a larger budget must not cost less than a smaller one")
    in_eager = [sum(sizes[s] * eager(s) for s in by_size.get(b, ())) for b in budgets]
    chosen = _cheapest(
        prices,
        list(accumulate((calls[budget] for budget in budgets), initial=0)),
        [0, *accumulate(reversed(in_eager))][::-1],
        frozenset(budgets.index(budget) + 1 for budget in required),
        count,
    )
    return tuple(budgets[i - 1] for i in chosen)


def _check(
    sizes: Mapping[int, int],
    count: int,
    granularity: int,
    largest: int | None,
    required: Collection[int],
) -> None:
    if count < 1 or granularity < 1:
        raise ValueError(f"count and granularity must be at least 1, got {count}, {granularity}")
    if any(size < 1 or number < 0 for size, number in sizes.items()):
        raise ValueError("sizes must be at least 1 and their counts not negative")
    if len(set(required)) > count:
        raise ValueError(f"{len(set(required))} budgets are required, but only {count} allowed")
    limit = max(required, default=1) if largest is None else largest
    if any(not 1 <= b <= limit or b % granularity for b in required):
        raise ValueError(
            f"required budgets must be multiples of {granularity} up to {limit}, "
            f"got {sorted(required)}"
        )


def _cheapest(
    prices: Sequence[float],
    below: Sequence[int],
    beyond: Sequence[float],
    required: Collection[int],
    count: int,
) -> list[int]:
    """Return the positions, from 1, of the budgets to choose, ascending.

    Args:
        prices: Cost of a replay of each candidate, ascending.
        below: Calls up to each position; position 0 is before the first candidate.
        beyond: Cost in eager mode of the calls above each position.
        required: Positions that must be chosen.
        count: How many may be.
    """
    last = max(required, default=0)
    best: list[float | None] = [0, *[None] * len(prices)]
    parents: list[list[int]] = []
    cheapest: tuple[float, int, int] | None = None if required else (beyond[0], 0, 0)
    for number in range(1, min(count, len(prices)) + 1):
        best, parent = _with_one_more(best, prices, below, required)
        parents.append(parent)
        for j in range(last, len(best)):
            cost = best[j]
            if cost is not None and (cheapest is None or cost + beyond[j] < cheapest[0]):
                cheapest = (cost + beyond[j], number, j)
    chosen: list[int] = []
    if cheapest is not None:
        _, number, j = cheapest
        for parent in reversed(parents[:number]):
            chosen.append(j)
            j = parent[j]
    return chosen[::-1]


def _with_one_more(
    best: Sequence[float | None],
    prices: Sequence[float],
    below: Sequence[int],
    required: Collection[int],
) -> tuple[list[float | None], list[int]]:
    """One step of the recurrence: least costs by the last position, and the position before it.

    The line of i is best[i] + price * (below[j] - below[i]); its part in j is the same for all i.
    """
    lines: deque[tuple[float, int, int]] = deque()  # value at price 0, -slope, position
    result: list[float | None] = [None] * len(best)
    parent = [0] * len(best)
    for j in range(1, len(best)):
        if j - 1 in required:
            lines.clear()  # none may be left out
        start = best[j - 1]
        if start is not None:
            _add(lines, (start, below[j - 1], j - 1))
        if not lines:
            continue
        price = prices[j - 1]
        while len(lines) > 1 and _at(lines[1], price) <= _at(lines[0], price):
            lines.popleft()
        result[j] = _at(lines[0], price) + price * below[j]
        parent[j] = lines[0][2]
    return result, parent


def _at(line: tuple[float, int, int], price: float) -> float:
    return line[0] - line[1] * price


def _add(lines: deque[tuple[float, int, int]], new: tuple[float, int, int]) -> None:
    """Append a line that falls at least as fast as all others; drop those never lowest again."""
    if lines and lines[-1][1] == new[1]:
        if lines[-1][0] <= new[0]:
            return
        lines.pop()
    while len(lines) > 1:
        (a, slope_a, _), (b, slope_b, _) = lines[-2], lines[-1]
        if (new[0] - a) * (slope_b - slope_a) > (b - a) * (new[1] - slope_a):
            break
        lines.pop()
    lines.append(new)
