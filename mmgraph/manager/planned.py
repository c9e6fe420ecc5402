"""Plans, and what there is to make them of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from mmgraph.manager.prices import Measured
from mmgraph.types import GraphKey, Reason

__all__ = ["Eager", "Graphs", "Plan", "Replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """Items served by one replay of the graph of `key`."""

    items: tuple[int, ...]
    key: GraphKey


@dataclass(frozen=True, slots=True)
class Eager:
    """Items that run in eager mode."""

    items: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to each item of a call; every item occurs once."""

    replays: tuple[Replay, ...]
    eager: tuple[Eager, ...]


@dataclass(frozen=True, slots=True)
class Graphs:
    """What the planner may count on.

    Attributes:
        captured: Keys of the graphs there are.
        failed: Keys that can't be captured, and why.
        may_capture: Whether a plan may ask for a key that isn't captured yet.
        missing: The reason for eager mode where a key is missing.
        general: The key that takes whatever a budget can hold, by budget, where there is room for
            hardly more graphs than budgets; ``None`` where there is room enough.
        measured: What graphs and eager mode take: another object once graphs came, went or failed.
    """

    captured: Collection[GraphKey]
    failed: Mapping[GraphKey, Reason]
    may_capture: bool
    missing: Reason = Reason.NOT_CAPTURED
    general: Callable[[int], GraphKey | None] | None = None
    measured: Measured = field(default_factory=Measured)

    def wanted(self, tightest: GraphKey) -> GraphKey:
        """What to capture for a replay of at least `tightest`."""
        general = None if self.general is None else self.general(tightest.token_budget)
        if general is None:
            return tightest
        general = general.of(tightest.signature)
        return general if general.covers(tightest) else tightest
