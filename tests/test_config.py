"""GraphConfig: what it refuses, and that the message says what is allowed."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from mmgraph import ConfigError, GraphConfig


@pytest.mark.parametrize("name", ["token_budgets", "row_budgets"])
@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        # no budget at all is not the same as None
        ((), "{} is empty: give at least one budget, or None to infer them"),
        # a budget of nothing
        ((0, 64), "every one of {} must be a positive integer, got 0"),
        # negative
        ((-64, 64), "every one of {} must be a positive integer, got -64"),
        # True is an int in Python, and no budget
        ((True, 64), "every one of {} must be a positive integer, got True"),
        # a fraction
        ((64.0, 128), "every one of {} must be a positive integer, got 64.0"),
        # text
        (("64",), "every one of {} must be a positive integer, got '64'"),
        # unsorted: the message shows the sorted ones
        ((128, 64), "{} must ascend without repeats, got (128, 64): use (64, 128)"),
        # repeated
        ((64, 64, 128), "{} must ascend without repeats, got (64, 64, 128): use (64, 128)"),
    ],
)
def test_budgets_out_of_range_are_refused(name: str, budgets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message.format(name))}$"):
        GraphConfig(**{name: budgets})


@pytest.mark.parametrize("name", ["token_budgets", "row_budgets"])
def test_a_lone_number_for_budgets_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        GraphConfig(**{name: 64})


@pytest.mark.parametrize("name", ["max_items", "max_graphs"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_counts_must_be_positive_integers(name: str, value: Any) -> None:
    message = re.escape(f"{name} must be a positive integer, got {value!r}")
    with pytest.raises(ConfigError, match=f"^{message}$"):
        GraphConfig(**{name: value})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"capture": "eager"}, "capture must be one of lazy, upfront, got 'eager'"),
        ({"capture": "LAZY"}, "capture must be one of lazy, upfront, got 'LAZY'"),
        ({"capture": None}, "capture must be one of lazy, upfront, got None"),
        ({"backend": "cpu"}, "backend must be one of auto, cuda, trace, got 'cpu'"),
    ],
)
def test_choices_are_named_in_the_message(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        GraphConfig(**setting)


def test_the_largest_budget_must_hold_max_items() -> None:
    assert GraphConfig(token_budgets=(4, 16), max_items=16).max_items == 16
    message = (
        "the largest of token_budgets, 16, can't hold max_items=17 items of a token each: raise it "
        "or lower max_items"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        GraphConfig(token_budgets=(4, 16), max_items=17)


def test_row_budgets_need_not_hold_max_items() -> None:
    assert GraphConfig(row_budgets=(1, 2), max_items=8).row_budgets == (1, 2)


def test_a_config_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="max_graphs"):
        GraphConfig(max_graphs=0)


def test_the_defaults_are_valid_and_capture_lazily() -> None:
    config = GraphConfig()
    assert (config.enforce_eager, config.cudagraph_mm_encoder) == (False, True)
    assert (config.token_budgets, config.row_budgets) == (None, None)
    assert (config.capture, config.backend, config.progress) == ("lazy", "auto", False)


def test_every_field_is_frozen_and_named() -> None:
    config = GraphConfig()
    for field in fields(GraphConfig):
        with pytest.raises(FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    with pytest.raises(TypeError):
        GraphConfig(True)  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


def test_equal_configs_are_equal_and_hash_alike() -> None:
    one, other = (GraphConfig(token_budgets=(64, 128)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != GraphConfig(token_budgets=(64, 256))
