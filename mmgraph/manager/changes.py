"""What happens when an encoder is no longer what its graphs were captured from.

A call may replay its graph first and compare the encoder meanwhile, as long as the memory that the
graph reads is held. It is held from the capture on until the graphs are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from mmgraph.log import WarnOnce, get_logger
from mmgraph.protocol import HeldMemory, SupportsChanges, SupportsLateChanges

__all__ = ["Changes"]

_MAX_IN_A_ROW = 3
_FEW_REPLAYS = 10


class Changes:
    """Compares the encoder with what was captured, at each call.

    Args:
        model: The encoder; one that doesn't implement ``SupportsChanges`` never changes.
        name: For messages.
        recapture: Whether graphs may come back by themselves.
        free: Frees every graph.
    """

    def __init__(
        self, model: object, name: str, *, recapture: bool, free: Callable[[], None]
    ) -> None:
        self._version = model.version if isinstance(model, SupportsChanges) else lambda: None
        self._hold: Callable[[], HeldMemory | None] = lambda: None
        if isinstance(model, SupportsLateChanges):
            self._hold = model.hold_memory
        self._held: HeldMemory | None = None
        self._has_graphs = False
        self._name = name
        self._recapture = recapture
        self._free = free
        self._captured: Hashable = self._version()
        self._in_a_row = self._replays = 0
        self._given_up = False
        self._warn_once = WarnOnce(get_logger(__name__))

    @property
    def holds(self) -> bool:
        """Whether the memory that graphs read is held, as far as that shows without a look."""
        return self._held is not None

    def may_come_late(self) -> bool:
        """Whether a graph may be replayed before the encoder is compared with what was captured."""
        held = self._held
        return held is not None and not self._given_up and held.is_there()

    def differs(self) -> bool:
        """Whether the encoder is something else than what was captured; frees nothing yet."""
        return self._version() != self._captured

    def noticed(self) -> bool:
        """Free graphs that are out of date; whether calls have to run in eager mode now."""
        version = self._version()
        if version == self._captured:
            if self._has_graphs and not (self._held and self._held.is_there()):
                self._take_hold()
            return self._given_up
        self._captured = version
        self._in_a_row = self._in_a_row + 1 if self._replays < _FEW_REPLAYS else 1
        self._replays = 0
        self._free()
        self._let_go()
        # An encoder that changes at each of its own calls would be captured at each call.
        self._given_up = not self._recapture or self._in_a_row > _MAX_IN_A_ROW
        then = "it runs in eager mode" if self._given_up else "its graphs are captured again"
        self._warn_once(then, "%s has changed since it was captured: %s", self._name, then)
        return self._given_up

    def renew(self) -> None:
        """Free graphs that are out of date, if there are some: they are about to be captured."""
        if self._given_up or self._version() != self._captured:
            self._free()
            self.reset()

    def replayed(self, *, fresh: bool = False) -> None:
        """Note that a graph served a call; a `fresh` one was captured for it."""
        self._replays += 1
        if fresh:
            self.captured()

    def captured(self) -> None:
        """Note that graphs were captured from the encoder as it is now."""
        self._captured = self._version()
        self._has_graphs = True
        self._take_hold()

    def reset(self) -> None:
        """Forget what was noticed; there are no graphs any more."""
        self._let_go()
        self._captured = self._version()
        self._given_up = False
        self._in_a_row = self._replays = 0

    def _take_hold(self) -> None:
        """Hold what the graphs read, unless the encoder changes at this moment."""
        held = self._hold()
        self._held = None if held is None or self.differs() else held

    def _let_go(self) -> None:
        self._held = None
        self._has_graphs = False
