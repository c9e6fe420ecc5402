"""Taking turns with a tower: as it is, or altered for a capture.

A capture runs the user's own module with other weights, blocks and attention in force. Calls of
other threads in eager mode wait for those moments, and a capture waits for calls that are running:
what is altered is never seen outside the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """Runs of one tower: as it is, by any number of threads at a time; altered, by one alone.

    Blocks may be nested in any way within a thread. Whoever waits to be alone comes before those
    who come later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together: dict[int, int] = {}
        self._alone: int | None = None
        self._depth = self._count = 0
        self._waiting = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the tower as it is within the block."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._may_join(me))
            self._together[me] = self._together.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._together[me] -= 1
                if not self._together[me]:
                    del self._together[me]
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Alter the tower and run it within the block."""
        me = threading.get_ident()
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._alone == me or self._is_free_for(me))
            finally:
                self._waiting -= 1
                self._changed.notify_all()
            self._alone = me
            self._depth += 1
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._alone = None
                    self._changed.notify_all()

    def alterations(self) -> int:
        """A number that is another one whenever the tower was altered, or is by another thread.

        Whoever reads the tower without taking a turn compares it before and after.
        """
        count = self._count  # before the other: whoever comes in between counts
        alone = self._alone
        # Who asks is looked up last: a compiler that traces this warns of the question.
        return -1 if alone is not None and alone != threading.get_ident() else count

    def _may_join(self, me: int) -> bool:
        if self._alone is not None:
            return self._alone == me
        return not self._waiting or me in self._together

    def _is_free_for(self, me: int) -> bool:
        return self._alone is None and all(thread == me for thread in self._together)
