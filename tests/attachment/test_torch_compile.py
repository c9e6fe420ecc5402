"""Towers that users hand to ``torch.compile``: what they compile runs as they compiled it.

Their compiled code holds the tower's operations and calls nothing of ours, so it is counted as
traced; the tower itself, called without it, goes on to run from graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

import mmgraph
from mmgraph import GraphConfig, Handle, Reason
from mmgraph.recipes import load_recipe

CONFIG = GraphConfig(row_budgets=(1, 2, 4))
CALLS = 3
compiled = partial(torch.compile, backend="eager")  # traced and run: its speed is no matter here


@pytest.fixture(autouse=True)
def no_code_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def tower() -> nn.Module:
    return load_recipe("vit:tiny").build_encoder(dtype=torch.float32)


@pytest.fixture
def twin(tower: nn.Module) -> nn.Module:
    return copy.deepcopy(tower)


def assert_right(asked: nn.Module, twin: nn.Module, handle: Handle) -> None:
    """What `asked` answers is what a tower without graphs does, and it is counted."""
    side = twin.config.image_size
    for call in range(CALLS):
        x, before = torch.randn(2, 3, side, side), handle.stats()
        ours = asked(x).last_hidden_state
        torch.testing.assert_close(ours, twin(x).last_hidden_state, rtol=1e-4, atol=1e-4)
        after = handle.stats()
        assert after.calls - before.calls == 1, call
        assert after.items - before.items == 2, call
        assert after.hits + sum(after.misses.values()) == after.items


def wrapped(tower: nn.Module) -> nn.Module:
    return compiled(tower)


def in_place(tower: nn.Module) -> nn.Module:
    tower.compile(backend="eager")
    return tower


@torch.no_grad()
@pytest.mark.parametrize("compile_", [wrapped, in_place])
def test_a_tower_that_was_compiled_before(
    tower: nn.Module, twin: nn.Module, compile_: Callable[[nn.Module], nn.Module]
) -> None:
    asked = compile_(tower)
    with mmgraph.attach(asked, CONFIG) as handle:
        assert_right(asked, twin, handle)
        assert handle.stats().misses == {Reason.COMPILING: 2 * CALLS}
    x = torch.randn(2, 3, tower.config.image_size, tower.config.image_size)
    torch.testing.assert_close(asked(x), twin(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("compile_", [wrapped, in_place])
def test_a_tower_that_is_compiled_while_it_is_attached(
    tower: nn.Module, twin: nn.Module, compile_: Callable[[nn.Module], nn.Module]
) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle)
        assert handle.stats().misses == {}
        asked = compile_(tower)
        assert_right(asked, twin, handle)
        assert handle.stats().misses == {Reason.COMPILING: 2 * CALLS}
        if asked is not tower:  # what isn't called through its wrapper has graphs as before
            assert_right(tower, twin, handle)
            assert handle.stats().misses == {Reason.COMPILING: 2 * CALLS}
    x = torch.randn(2, 3, tower.config.image_size, tower.config.image_size)
    torch.testing.assert_close(asked(x), twin(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_tower_whose_forward_alone_is_compiled(tower: nn.Module, twin: nn.Module) -> None:
    """The `trace` backend can't record compiled code, and finds another way or none."""
    tower.forward = compiled(tower.forward)
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle)
