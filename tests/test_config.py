"""GraphConfig: what it refuses, and that the message says what is allowed."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
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


@pytest.mark.parametrize(
    "config",
    [
        GraphConfig(),
        GraphConfig(token_budgets=(64, 128), capture="upfront", progress=True, max_graphs=3),
        GraphConfig(row_budgets=(1, 2), enforce_eager=True),
    ],
)
def test_a_config_survives_a_file(tmp_path: Path, config: GraphConfig) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert GraphConfig.from_file(path) == config
    assert GraphConfig.from_file(str(path)) == config
    assert config.to_dict().keys() == {field.name for field in fields(GraphConfig)}


def test_settings_that_a_file_lacks_have_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"token_budgets": [64, 128]}', encoding="utf-8")
    assert GraphConfig.from_file(path) == GraphConfig(token_budgets=(64, 128))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is no JSON: Expecting value"),
        ("{token_budgets: 1}", "the file is no JSON: Expecting property name"),
        ("[64, 128]", "settings must be a JSON object, got [64, 128]"),
        ('{"budgets": [64]}', "there is no setting 'budgets': GraphConfig has align_weights, "),
        ('{"enforce_eager": "no"}', "enforce_eager must be true or false, got 'no'"),
        ('{"progress": 1}', "progress must be true or false, got 1"),
        ('{"max_items": "8"}', "max_items must be a positive integer, got '8'"),
        ('{"max_graphs": null}', "max_graphs must be a positive integer, got None"),
        ('{"token_budgets": 64}', "token_budgets must be a tuple of integers or None, got 64"),
        ('{"token_budgets": ["64"]}', "every one of token_budgets must be a positive integer"),
        ('{"row_budgets": [2, 1]}', "row_budgets must ascend without repeats, got (2, 1)"),
        ('{"capture": "never"}', "capture must be one of lazy, upfront, got 'never'"),
        ('{"capture": ["lazy"]}', "capture must be one of lazy, upfront, got ['lazy']"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {message}')}"):
        GraphConfig.from_file(path)


def test_a_file_that_can_not_be_read_is_a_config_error(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=rf"the file can't be read \({why}"):
            GraphConfig.from_file(path)
