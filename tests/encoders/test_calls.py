"""Calls as data: what is bound, what is baked in, and what can't be."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import Reason, Refusal
from mmgraph.encoders import TowerSignature
from mmgraph.encoders.calls import config_flags, freeze, thaw
from mmgraph.recipes import load_recipe

constants = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down: 1, 1.0 and True are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


@settings(deadline=None)
@given(constants)
def test_a_frozen_constant_can_be_hashed_and_thawed(value: Any) -> None:
    frozen = freeze(value)
    hash(frozen)
    assert same(thaw(frozen), value)


@settings(deadline=None)
@given(constants)
def test_the_same_constant_is_frozen_to_the_same_key(value: Any) -> None:
    assert freeze(value) == freeze(thaw(freeze(value)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], (1, 2)),  # a list is no tuple
        ([1, [2]], [1, 2]),  # nor is nesting lost
        ([], ()),  # not even when empty
        ((), None),
        ("1", 1),
        (torch.float16, torch.bfloat16),
        (torch.float16, "torch.float16"),
    ],
)
def test_different_constants_are_different_keys(one: Any, other: Any) -> None:
    assert freeze(one) != freeze(other)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ([1], [True])])
def test_numbers_of_different_types_are_different_keys(one: Any, other: Any) -> None:
    assert freeze(one) != freeze(other)


def test_a_dtype_is_a_constant() -> None:
    assert thaw(freeze([torch.float16, None])) == [torch.float16, None]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": 1}, "dict"),
        ({1}, "set"),
        (object(), "object"),
        (torch.device("cpu"), "device"),
        (torch.zeros(1), "Tensor"),
        ([1, {"a": 1}], "dict"),  # inside a list
        ((1, (2, b"x")), "bytes"),  # inside a tuple of tuples
        (print, "builtin_function_or_method"),
    ],
)
def test_what_is_no_constant_is_refused_by_its_type(value: Any, named: str) -> None:
    with pytest.raises(Refusal, match=f"^an argument of type {named}$") as caught:
        freeze(value)
    assert caught.value.reason is Reason.UNSUPPORTED_CALL


def test_the_flags_of_a_config_are_read_each_time() -> None:
    config = load_recipe("vit:tiny").config()
    seen = [config_flags(config)]
    for flag in ("output_hidden_states", "return_dict", "output_attentions"):
        if flag == "output_attentions":
            config._attn_implementation = "eager"  # only so can it be switched on
        setattr(config, flag, not getattr(config, flag))
        seen.append(config_flags(config))
    assert len(set(seen)) == 4


def test_a_flag_that_is_1_is_not_true() -> None:
    one, true = (config_flags(SimpleNamespace(output_hidden_states=v)) for v in (1, True))
    assert one != true


class Towers:
    """Forwards as classes define them, self first."""

    def vision(self, pixel_values: Any, position_ids: Any = None, scale: float = 1.0) -> None: ...
    def packed(self, hidden_states: Any, grid_thw: Any, **kwargs: Any) -> None: ...
    def starred(self, x: Any, *more: Any, flag: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "bound"),
    [
        (Towers.vision, (1,), {}, {"pixel_values": 1}),  # positional
        (Towers.vision, (), {"pixel_values": 1}, {"pixel_values": 1}),  # by name
        (Towers.vision, (1, 2), {"scale": 3}, {"pixel_values": 1, "position_ids": 2, "scale": 3}),
        (Towers.vision, (), {}, {}),  # nothing: what is missing is the tower's to say
        (Towers.vision, (1,), {"odd": 2}, {"pixel_values": 1, "odd": 2}),  # an unknown name
        (Towers.packed, (1, 2), {"odd": 3}, {"hidden_states": 1, "grid_thw": 2, "odd": 3}),
        (Towers.starred, (1,), {"flag": False}, {"x": 1, "flag": False}),  # keyword only
    ],
)
def test_bind_names_the_arguments_that_were_given(
    forward: Callable[..., Any], args: Any, kwargs: Any, bound: Any
) -> None:
    assert TowerSignature(forward).bind(args, kwargs) == bound


@pytest.mark.parametrize(
    ("forward", "args"),
    [
        (Towers.vision, (1, 2, 3, 4)),  # one too many
        (Towers.packed, (1, 2, 3)),  # keywords take no positional argument
        (Towers.starred, (1, 2)),  # stars have no names
    ],
)
def test_bind_refuses_more_arguments_than_parameters(
    forward: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with pytest.raises(Refusal) as caught:
        TowerSignature(forward).bind(args, {})
    assert caught.value.reason is Reason.UNSUPPORTED_CALL
    assert caught.value.num_items == 1


def test_bind_refuses_an_argument_given_twice() -> None:
    with pytest.raises((Refusal, TypeError)):
        TowerSignature(Towers.vision).bind((1,), {"pixel_values": 2})


@pytest.mark.parametrize(
    ("forward", "name"),
    [(Towers.vision, "pixel_values"), (Towers.packed, "hidden_states"), (Towers.starred, "x")],
)
def test_the_main_input_is_the_first_parameter(forward: Callable[..., Any], name: str) -> None:
    assert TowerSignature(forward).main_input == name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("position_ids", None, True),  # the default itself
        ("scale", 1.0, True),
        ("scale", 1, False),  # equal, but another type
        ("scale", 2.0, False),
        ("pixel_values", None, False),  # no default
        ("odd", None, False),  # no such parameter
        ("use_cache", True, True),  # a word for the decoder, which towers pass by
    ],
)
def test_an_argument_is_default_if_leaving_it_out_is_the_same(
    name: str, value: Any, expected: bool
) -> None:
    assert TowerSignature(Towers.vision).is_default(name, value) is expected
