"""Captures have a tower's caches to themselves, and the tower keeps its own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, ViTConfig
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from mmgraph import GraphConfig, attach
from mmgraph.encoders import eager_towers
from mmgraph.modules.caches import private_caches

made: list[tuple[str, int]] = []


def table(name: str, size: int, device: torch.device) -> torch.Tensor:
    made.append((name, size))
    return torch.arange(size, device=device, dtype=torch.float32).sin()[:, None]


@functools.lru_cache(maxsize=1)
def of_module(size: int, device: torch.device) -> torch.Tensor:
    return table("module", size, device)


class Memoises(PreTrainedModel):
    """Adds tables that it keeps in every way that models of transformers do, each for one size."""

    config_class = ViTConfig
    main_input_name = "pixel_values"
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__(ViTConfig(image_size=4, patch_size=2))
        self.layer = nn.Linear(48, 8)
        self.post_init()

    @staticmethod
    @compile_compatible_method_lru_cache(maxsize=1)
    def of_static(size: int, device: torch.device) -> torch.Tensor:
        return table("static", size, device)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def of_method(self, size: int, device: torch.device) -> torch.Tensor:
        return table("method", size, device)

    def on_itself(self, size: int, device: torch.device) -> torch.Tensor:
        if not hasattr(self, "last") or len(self.last) != size:
            self.last = table("attribute", size, device)
        return self.last

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        where = len(pixel_values), pixel_values.device
        tables = (of_module(*where), self.of_static(*where), self.of_method(*where))
        return self.layer(pixel_values.flatten(1)) + sum(tables) + self.on_itself(*where)


NAMES = ("attribute", "method", "module", "static")


@pytest.fixture
def tower(device: str) -> Iterator[Memoises]:
    torch.manual_seed(0)
    yield Memoises().eval().to(device)
    of_module.cache_clear()
    Memoises.of_method.cache_clear()
    made.clear()


def run(tower: Memoises, rows: int) -> torch.Tensor:
    return tower(torch.rand(rows, 3, 4, 4, device=tower.device))


@torch.no_grad()
def test_within_the_block_all_is_made_anew_and_kept(tower: Memoises) -> None:
    run(tower, 2)
    made.clear()
    with private_caches(tower) as kept:
        for rows in (3, 4, 3):
            run(tower, rows)
    names = sorted(name for name, size in made if size == 3)
    assert names == ["attribute", "attribute", "method", "module", "static"]
    assert kept.num_bytes == 4 * (3 * (3 + 4) + 3)  # three functions for two sizes, one attribute


@torch.no_grad()
def test_afterwards_the_towers_own_are_as_they_were(tower: Memoises) -> None:
    run(tower, 2)
    held = tower.last
    made.clear()
    with private_caches(tower):
        run(tower, 3)
    made.clear()
    assert tower.last is held
    run(tower, 2)
    assert made == []


@torch.no_grad()
def test_what_was_not_there_before_is_not_there_afterwards(tower: Memoises) -> None:
    with private_caches(tower):
        run(tower, 6)
    assert "last" not in vars(tower)
    run(tower, 6)
    assert sorted(made[len(NAMES) :]) == [(name, 6) for name in NAMES]


@torch.no_grad()
def test_an_error_in_the_block_leaves_nothing_changed(tower: Memoises) -> None:
    run(tower, 2)
    functions = dict(vars(Memoises)), of_module
    with pytest.raises(RuntimeError, match="shapes"), private_caches(tower):
        tower(torch.rand(3, 5, device=tower.device))
    assert (dict(vars(Memoises)), of_module) == functions
    made.clear()
    run(tower, 2)
    assert made == []


@torch.no_grad()
def test_other_threads_keep_the_towers_own_caches(tower: Memoises) -> None:
    """What is made for a recording holds nothing yet when they would find it."""
    size = 9, tower.device
    with private_caches(tower):
        ours = [f(*size) for f in current(tower)]
        theirs: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: theirs.extend(f(*size) for f in current(tower)))
        thread.start()
        thread.join()
        assert not any(a is b for a, b in zip(ours, theirs, strict=True))
    assert all(f(*size) is table for f, table in zip(current(tower), theirs, strict=True))


def current(tower: Memoises) -> list[Any]:
    """The functions as a forward would find them now."""
    return [globals()["of_module"], tower.of_static, tower.of_method]


@torch.no_grad()
def test_threads_take_turns_and_leave_nothing_changed(tower: Memoises) -> None:
    run(tower, 2)
    memo = Memoises.of_method

    def captures() -> None:
        for rows in range(3, 20):
            with private_caches(tower):
                run(tower, rows)

    threads = [threading.Thread(target=captures) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Memoises.of_method is memo
    made.clear()
    run(tower, 2)
    assert made == []


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@torch.no_grad()
def test_graphs_and_eager_calls_never_share_a_table(tower: Memoises, mode: str) -> None:
    """Each cache holds one size: a graph of another one must not read what was dropped."""
    config = GraphConfig(mode=mode, row_budgets=(1, 2, 3, 5), max_items=1)
    with attach(tower, config) as handle:
        for rows in (2, 3, 5, 1, 2, 5, 3, 1, 2, 3):
            pixels = torch.rand(rows, 3, 4, 4, device=tower.device)
            output = tower(pixels)
            filler = [torch.full((rows, 1), 1e3, device=tower.device) for _ in range(32)]
            with eager_towers():
                expected = tower(pixels)
                run(tower, 7)
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(tower(pixels), expected, rtol=1e-3, atol=1e-3)
            del filler
        assert handle.stats().hits > 10
