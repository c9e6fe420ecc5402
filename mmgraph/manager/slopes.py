"""How much longer a call takes for what its attention computes, over many calls."""

from __future__ import annotations

__all__ = ["Slope"]

_NEXT_TO_NOTHING = 0.25


class Slope:
    """Seconds per square, by least squares over pairs of calls of one size.

    A pair of large calls that differ much says more than small ones do, whose difference is noise.
    """

    def __init__(self) -> None:
        self._products = 0.0
        self._squares = 0.0

    def hears(self, squares: int) -> bool:
        """Whether a pair that differs by `squares` says enough beside what is known."""
        return float(squares) ** 2 > _NEXT_TO_NOTHING * self._squares

    def add(self, seconds: float, squares: int) -> None:
        """Take in by how much two calls differ."""
        self._products += seconds * squares
        self._squares += float(squares) ** 2

    @property
    def value(self) -> float:
        """0 where nothing is known, or more of them take no longer."""
        return max(0.0, self._products / self._squares) if self._squares else 0.0
