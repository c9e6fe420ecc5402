"""Costs by tokens, from a few measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

__all__ = ["Curve"]


class Curve:
    """Costs of any number of tokens, through measured ones.

    Between two measurements it is a straight line. Beyond them it is proportional to the tokens
    plus something fixed, as :class:`LinearCost` is.

    Args:
        points: Costs by tokens, at least one.
        fixed: What a call costs besides its tokens, in the time of a token.
        floor: Whether nothing costs less than the smallest number of tokens measured.
    """

    def __init__(self, points: Mapping[int, float], fixed: int, *, floor: bool = False) -> None:
        self._tokens = sorted(points)
        self._costs = [points[tokens] for tokens in self._tokens]
        self._fixed = fixed
        self._floor = floor

    def __call__(self, tokens: int) -> float:
        """The cost of `tokens` tokens."""
        known, costs = self._tokens, self._costs
        i = bisect_left(known, tokens)
        if i == len(known):
            return self._scaled(-1, tokens)
        if known[i] == tokens or (i == 0 and self._floor):
            return costs[i]
        if i == 0:
            return self._scaled(0, tokens)
        share = (tokens - known[i - 1]) / (known[i] - known[i - 1])
        return costs[i - 1] + share * (costs[i] - costs[i - 1])

    def _scaled(self, i: int, tokens: int) -> float:
        return self._costs[i] * (tokens + self._fixed) / (self._tokens[i] + self._fixed)
