"""Functions of other modules, replaced for the threads that are inside a block and nobody else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ThreadPatch"]


class ThreadPatch:
    """A function that behaves differently in some threads for a while.

    The attribute is replaced when the first block is entered and put back when the last is left,
    unless somebody has replaced it again in between: then theirs stays, and calls the original.

    Args:
        owner: The module.
        name: The function in it.
        instead: What threads inside a block get; takes whatever the callers of the function pass.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._instead = instead
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._original: Any = None
        self._patch: Any = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the function within the block, for this thread."""
        thread = threading.get_ident()
        with self._lock:
            if not self._inside:
                self._original = getattr(self._owner, self._name)
                self._patch = self._make(self._original)
                setattr(self._owner, self._name, self._patch)
            self._inside.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(thread)
                if not self._inside and getattr(self._owner, self._name) is self._patch:
                    setattr(self._owner, self._name, self._original)

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() in self._inside:
                return self._instead(*args, **kwargs)
            return original(*args, **kwargs)

        return patched
