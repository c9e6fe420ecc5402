"""Which items of a call are replayed together, and in which budget.

A replay costs about its budget in tokens plus something fixed. Few large replays waste padding,
many small ones waste the fixed part and the width of the GPU; the choice here is the cheapest of
one first-fit-decreasing packing for each budget taken as the capacity, each bin of which is taken
apart where its items are cheaper alone. So it never costs more than a replay for each item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmgraph.policy.budgets import smallest_fit

__all__ = ["Bin", "Packing", "pack"]


@dataclass(frozen=True, slots=True)
class Bin:
    """Items that one replay serves.

    Attributes:
        items: Indices of the items, ascending.
        budget: The smallest budget that holds them.
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


def pack(sizes: Sequence[int], budgets: Sequence[int], overhead: int = 256) -> Packing:
    """Divide items of `sizes` tokens over replays of the ascending `budgets`.

    Args:
        sizes: Tokens of each item.
        budgets: Ascending budgets in tokens.
        overhead: What a further replay costs, in tokens.
    """
    largest = budgets[-1] if budgets else 0
    fitting = [i for i, size in enumerate(sizes) if size <= largest]
    oversized = tuple(i for i, size in enumerate(sizes) if size > largest)
    if not fitting:
        return Packing((), oversized)
    total = smallest_fit(budgets, sum(sizes[i] for i in fitting))
    if total is not None and (len(fitting) == 1 or total == budgets[0]):
        return Packing((Bin(tuple(fitting), total),), oversized)
    longest = max(sizes[i] for i in fitting)
    capacities = [b for b in budgets if b >= longest and (total is None or b <= total)]
    descending = sorted(fitting, key=lambda i: -sizes[i])
    candidates = (
        Packing(
            tuple(
                part
                for bin_ in _first_fit(descending, sizes, budgets, capacity)
                for part in _divided(bin_, sizes, budgets, overhead)
            ),
            oversized,
        )
        for capacity in reversed(capacities)
    )
    return min(candidates, key=lambda packing: packing.cost(overhead))


def _divided(
    bin_: Bin, sizes: Sequence[int], budgets: Sequence[int], overhead: int
) -> tuple[Bin, ...]:
    """The bin, or a replay for each of its items if that is cheaper."""
    limit = bin_.budget + overhead
    alone: list[Bin] = []
    for item in bin_.items:
        budget = smallest_fit(budgets, sizes[item])
        assert budget is not None, "an item of a bin fits the budget of that bin"
        alone.append(Bin((item,), budget))
        limit -= budget + overhead
        if limit <= 0:
            return (bin_,)
    return tuple(alone)


def _first_fit(
    descending: Sequence[int], sizes: Sequence[int], budgets: Sequence[int], capacity: int
) -> tuple[Bin, ...]:
    contents: list[list[int]] = []
    free: list[int] = []
    first_open = 0
    for item in descending:
        size = sizes[item]
        while first_open < len(free) and free[first_open] == 0:
            first_open += 1
        for i in range(first_open, len(free)):
            if size <= free[i]:
                break
        else:
            i = len(free)
            contents.append([])
            free.append(capacity)
        contents[i].append(item)
        free[i] -= size
    bins = []
    for items, room in zip(contents, free, strict=True):
        budget = smallest_fit(budgets, capacity - room)
        assert budget is not None, "a bin never exceeds its capacity, which is a budget"
        bins.append(Bin(tuple(sorted(items)), budget))
    return tuple(bins)
