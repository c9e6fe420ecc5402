"""Sizes of calls, read from a file: statistics of mmgraph, or a list of numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmgraph.errors import ConfigError

__all__ = ["Trace", "read_trace"]

_SEPARATORS = re.compile(r"[\s,;]+")


@dataclass(frozen=True, slots=True)
class Trace:
    """What was observed.

    Attributes:
        calls: Number of calls by the tokens of all their items.
        items: Number of items by their tokens.
        budgets: Ascending budgets that served them, in tokens; empty where unknown.
    """

    calls: dict[int, int]
    items: dict[int, int]
    budgets: tuple[int, ...] = ()


def read_trace(path: Path) -> Trace:
    """Read statistics (``handle.stats().save(path)``), or a list of sizes in tokens.

    A list is a JSON array, or a text of numbers divided by commas, spaces or new lines, with at
    most one heading; each number is a call of one item. A JSON object of sizes with their counts
    does too.

    Raises:
        ConfigError: The file can't be read, or holds no sizes. The message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        trace = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: the file can't be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is no text in UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not trace.calls:
        raise ConfigError(f"{path}: the file holds no sizes of calls, so there is nothing to fit")
    return trace


def _from_json(text: str) -> Trace:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the file is no JSON: {error}") from None
    if isinstance(data, list):
        return _of_single_items(Counter(_positive(size, "a size") for size in data))
    if "call_sizes" not in data:
        return _of_single_items(_counts(data, "the file"))
    budgets = data.get("budgets", [])
    if not isinstance(budgets, list):
        raise ConfigError(f"budgets must be a list, got {budgets!r:.40}")
    return Trace(
        _counts(data["call_sizes"], "call_sizes"),
        _counts(data.get("item_sizes", {}), "item_sizes"),
        tuple(sorted({_positive(budget, "a budget") for budget in budgets})),
    )


def _from_text(text: str) -> Trace:
    sizes: Counter[int] = Counter()
    headings = 0
    for number, line in enumerate(text.splitlines(), start=1):
        words = [word for word in _SEPARATORS.split(line) if word]
        if words and not sizes and not headings and not any(c.isdigit() for c in line):
            headings = len(words)
            continue
        if headings and len(words) > 1:
            raise ConfigError(f"line {number} has {len(words)} columns: give one of sizes only")
        sizes.update(_positive(word, f"line {number}: a size") for word in words)
    return _of_single_items(sizes)


def _of_single_items(sizes: dict[int, int]) -> Trace:
    return Trace(dict(sizes), dict(sizes))


def _counts(data: Any, what: str) -> dict[int, int]:
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be a JSON object of sizes and counts, got {data!r:.40}")
    counts: Counter[int] = Counter()
    for size, count in data.items():
        counts[_positive(size, f"a size in {what}")] += _positive(count, f"the count of {size}")
    return dict(counts)


def _positive(value: object, what: str) -> int:
    """An int from 1, given as one or as its digits."""
    number = value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{what} must be a positive integer, got {value!r:.40}")
    return number
