"""The token budgets of an encoder, from the config or from what it is."""

from __future__ import annotations

from mmgraph.config import GraphConfig
from mmgraph.errors import ConfigError
from mmgraph.policy import ladder, squared
from mmgraph.types import EncoderFacts

__all__ = ["budgets_of", "checked_budgets"]

_DEFAULT_ROWS = (1, 2, 4, 8, 16, 32)
_DEFAULT_BUDGETS = 16


def budgets_of(config: GraphConfig, facts: EncoderFacts) -> tuple[int, ...]:
    """Return the ascending token budgets to capture.

    Raises:
        ConfigError: The budgets that were given don't fit the encoder.
    """
    row = facts.tokens_per_row
    if facts.layout == "rows":
        if config.row_budgets is None and config.token_budgets is not None:
            budgets = tuple(sorted({tokens // row for tokens in config.token_budgets} - {0}))
            if not budgets:
                raise ConfigError(
                    f"no token budget holds one row of {facts.name}, which has {row} tokens: "
                    f"raise token_budgets, or set row_budgets"
                )
        else:
            budgets = config.row_budgets or _DEFAULT_ROWS
        return tuple(rows * row for rows in budgets)
    if config.token_budgets is None:
        step = facts.token_granularity
        return squared(ladder(facts.min_tokens, facts.max_tokens, _DEFAULT_BUDGETS, step), step)
    granularity = facts.token_granularity
    odd = [tokens for tokens in config.token_budgets if tokens % granularity]
    if odd:
        raise ConfigError(
            f"token budgets of {facts.name} must be multiples of {granularity} (its spatial "
            f"merge), got {odd[0]}: use {-(-odd[0] // granularity) * granularity}"
        )
    return config.token_budgets


def checked_budgets(budgets: tuple[int, ...], facts: EncoderFacts) -> tuple[int, ...]:
    """Return `budgets`, in tokens, as `budgets_of` would if a config named them.

    Raises:
        ConfigError: They aren't ascending positive integers, or don't fit the encoder.
    """
    return budgets_of(GraphConfig(token_budgets=budgets, max_items=1), facts)
