"""Items that graphs did not serve: counted each time, and said once where that helps a user."""

from __future__ import annotations

import logging

from mmgraph.config import GraphConfig
from mmgraph.log import WarnOnce, get_logger
from mmgraph.stats import StatsRecorder
from mmgraph.types import Reason

__all__ = ["Misses"]

_LOGGED = frozenset(
    {
        Reason.UNSUPPORTED_CALL,
        Reason.NOT_CAPTURED,
        Reason.GRAPH_LIMIT,
        Reason.TRAINING,
        Reason.HOOKS,
        Reason.GRAD,
        Reason.AUTOCAST,
        Reason.DTYPE,
        Reason.DEVICE,
        Reason.PLACEMENT,
        Reason.COMPILING,
    }
)
"""Reasons that lie with the call or the settings; of the others something else is logged."""


class Misses:
    """Counts items in eager mode and logs their reasons.

    Args:
        stats: Counts.
        config: What the user wants.
        name: Of the encoder, for messages.
        has_exact: Whether calls may have graphs of their own.
    """

    def __init__(
        self, stats: StatsRecorder, config: GraphConfig, name: str, *, has_exact: bool
    ) -> None:
        self._stats = stats
        self._name = name
        # The first call of its sizes has no graph yet where it may get one.
        self._expected = {Reason.UNSUPPORTED_CALL} if has_exact else set[Reason]()
        if config.capture == "lazy":
            self._expected.add(Reason.NOT_CAPTURED)
        self._log_once = WarnOnce(get_logger(__name__))

    def add(self, reason: Reason, num_items: int, why: str = "") -> None:
        """Note that `num_items` items ran in eager mode because of `reason`."""
        self._stats.missed(reason, num_items)
        if reason in _LOGGED:
            self._log_once(
                reason,
                "%s: a call was served in eager mode: %s",
                self._name,
                why or reason.value,
                level=logging.INFO if reason in self._expected else logging.WARNING,
            )
