"""Budgets for what an encoder has seen."""

from __future__ import annotations

from collections.abc import Sequence

from mmgraph.errors import ConfigError
from mmgraph.log import get_logger
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.policy import as_replays, fit

__all__ = ["refit"]

_logger = get_logger(__name__)


def refit(managers: Sequence[EncoderCudaGraphManager], count: int) -> bool:
    """Give each of `managers` the best at most `count` budgets; whether any of them changed.

    Raises:
        ConfigError: `count` is no positive integer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"refit() takes how many budgets to fit, from 1; got {count!r}")
    changed = False
    for manager in managers:
        budgets = _fitted(manager, count)
        if budgets != manager.budgets:
            manager.use_budgets(budgets)
            changed = True
    return changed


def _fitted(manager: EncoderCudaGraphManager, count: int) -> tuple[int, ...]:
    """The best ladder for the calls that `manager` saw; today's where no graph could serve any.

    No budget is above both today's largest and what the encoder is captured for by default.
    """
    facts, stats = manager.facts, manager.stats()
    step = facts.tokens_per_row if facts.layout == "rows" else facts.token_granularity
    largest = max(manager.budgets[-1], facts.max_tokens) // step * step
    sizes = as_replays(stats.call_sizes, stats.item_sizes, largest)
    budgets = fit(sizes, count, granularity=step, largest=largest)
    if not budgets:
        _logger.info("%s: no sizes to fit the budgets to, so they stay", facts.name)
        return manager.budgets
    _logger.info("%s: budgets for %d replays: %s", facts.name, sum(sizes.values()), budgets)
    return budgets
