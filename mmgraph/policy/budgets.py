"""Ladders of token budgets, and tiers of what else a graph's key bounds from above."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["ladder", "segment_tier", "seqlen_tier", "smallest_fit", "squared"]

_NEAR = 0.05


def ladder(smallest: int, largest: int, count: int, granularity: int = 1) -> tuple[int, ...]:
    """Return at most `count` budgets from `smallest` to `largest`, spaced geometrically.

    For sizes spread evenly over a logarithmic scale an even geometric spacing pads least. Every
    budget is a multiple of `granularity`; the last one holds `largest`.

    Args:
        smallest: Tokens of the smallest item, at least 1.
        largest: Tokens of the largest, at least `smallest`.
        count: Number of budgets, at least 1.
        granularity: Token counts are multiples of this.

    Raises:
        ValueError: The arguments are out of range.
    """
    if not (1 <= smallest <= largest and count >= 1 and granularity >= 1):
        raise ValueError(
            f"a ladder needs 1 <= smallest <= largest, count and granularity of at least 1; "
            f"got {smallest}, {largest}, {count}, {granularity}"
        )
    if count == 1:
        return (_round_up(largest, granularity),)
    ratio = (largest / smallest) ** (1 / (count - 1))
    steps = (min(largest, round(smallest * ratio**i)) for i in range(count - 1))
    return tuple(sorted({_round_up(step, granularity) for step in (*steps, largest)}))


def squared(budgets: Sequence[int], granularity: int = 1) -> tuple[int, ...]:
    """Move each of the ascending `budgets` but the ends to a square image next to it.

    Square images of usual sides (448, 672, 896, 1344) then fill a budget, where they would just
    miss one and leave a quarter of the next empty. What isn't within 5 % of a square stays; of
    several it is the one whose side can be halved most often, as usual sides can.

    Args:
        budgets: In tokens.
        granularity: Tokens that are merged into one, a square of them.
    """
    between = [_squared(tokens, granularity) for tokens in budgets[1:-1]]
    kept = {
        square if budgets[0] < square < budgets[-1] else tokens
        for tokens, square in zip(budgets[1:-1], between, strict=True)
    }
    return tuple(sorted({*budgets[:1], *kept, *budgets[-1:]}))


def _squared(tokens: int, granularity: int) -> int:
    least, most = ((tokens * (1 + by) / granularity) ** 0.5 for by in (-_NEAR, _NEAR))
    sides = range(math.ceil(least), math.floor(most) + 1)
    squares = sorted((-(side & -side), granularity * side * side) for side in sides)
    best = [square for halves, square in squares if halves == squares[0][0]]
    return min(best, key=lambda square: abs(square - tokens), default=tokens)


def segment_tier(count: int) -> int:
    """Return the capacity, at least `count`, of a graph's table of attention segments.

    Tiers are 1, 2, 4, 8 and from there on 2^k and 1.5 x 2^k: an empty entry costs the kernel time
    (30 to 60 % on small inputs if a table of 64 serves one segment), each tier costs a graph.
    """
    power = 1 << max(0, count - 1).bit_length()
    middle = power * 3 // 4
    return middle if power >= 16 and count <= middle else power


def seqlen_tier(length: int, token_budget: int) -> int:
    """Return the bound, at least `length`, on the longest segment in a graph of `token_budget`.

    The next power of two, but no more than the budget: one image that fills a budget and the
    frames of a video of the same total get graphs of their own. On windows a bound far above the
    true length costs the kernel four times its time.
    """
    return min(1 << max(0, length - 1).bit_length(), max(token_budget, length))


def smallest_fit(budgets: Sequence[int], tokens: int) -> int | None:
    """Return the smallest of the ascending `budgets` that holds `tokens`, or ``None``."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def _round_up(value: int, granularity: int) -> int:
    return -(-value // granularity) * granularity
