"""Tables in Markdown, and numbers in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["NONE", "number", "optional", "table"]

NONE = "-"
"""What stands for nothing."""


def table(cells: Sequence[Sequence[str]]) -> str:
    """Return a table of `cells`, header first; columns are padded, so it reads in a terminal."""
    return "\n".join(_lines(cells))


def number(value: float) -> str:
    """Three digits, or all before the point."""
    decimals = next((d for limit, d in ((1, 3), (10, 2), (100, 1)) if value < limit), 0)
    return f"{value:.{decimals}f}"


def optional(value: float | None) -> str:
    """The number, or what stands for nothing."""
    return NONE if value is None else number(value)


def _lines(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    for line in (cells[0], rule, *cells[1:]):
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"
