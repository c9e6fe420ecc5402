"""How much Python does, whatever the machine and whoever else runs on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lines_run"]


def lines_run(run: Callable[[], object]) -> int:
    """Lines of Python that `run` executes, those of what it calls included."""
    count = 0

    def trace(_: Any, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count
