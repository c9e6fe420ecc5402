"""`Handle.refit`: budgets that fit what was seen, and results that still equal eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import ConfigError, GraphConfig, Handle, cli
from mmgraph.encoders import eager_towers
from mmgraph.recipes import load_recipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(token_budgets=(64, 128, 256), row_budgets=(1, 2, 4), compile_blocks=False)
GRIDS = ((1, 4, 4), (1, 4, 6), (1, 8, 8))
"""16, 24 and 64 patches."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def qwen(device: str = "cpu") -> Any:
    return load_recipe("qwen2_5_vl:tiny").build_encoder(device=device)


def clip(device: str = "cpu") -> Any:
    return load_recipe("clip:tiny").build_model(device=device)


def patches(*grids: tuple[int, int, int], device: str = "cpu") -> dict[str, torch.Tensor]:
    total = sum(t * h * w for t, h, w in grids)
    return {
        "hidden_states": torch.randn(total, 1176, device=device),
        "grid_thw": torch.tensor(grids, device=device),
    }


@torch.no_grad()
def assert_equal_to_eager(model: Any, *grids: tuple[int, int, int], device: str = "cpu") -> None:
    call = patches(*grids, device=device)
    ours = model(**call).last_hidden_state
    with eager_towers():
        eager = model(**call).last_hidden_state
    assert float((ours - eager).norm() / eager.norm()) <= (1e-5 if device == "cpu" else 1e-3)


def held(handle: Handle) -> set[int]:
    return {graph.key.token_budget for graph in handle.stats().graphs}


def test_budgets_become_the_sizes_that_were_seen(device: str) -> None:
    model = qwen(device)
    with mmgraph.attach(model, CONFIG) as handle:
        for grid in GRIDS:
            assert_equal_to_eager(model, grid, device=device)
        assert held(handle) == {64}
        assert handle.stats().padding == 48 + 40
        (name,) = handle.towers
        assert handle.refit() == {name: (16, 24, 64)}
        assert handle.stats().budgets == (16, 24, 64)
        for grid in GRIDS:
            assert_equal_to_eager(model, grid, device=device)
        assert handle.stats().padding == 48 + 40  # none was added
        assert held(handle) == {16, 24, 64}
        assert handle.stats().misses == {}
    assert "forward" not in model.__dict__


def test_fewer_budgets_than_sizes_pad_as_little_as_they_can(device: str) -> None:
    model = qwen(device)
    with mmgraph.attach(model, CONFIG) as handle:
        for grid in (*GRIDS, GRIDS[0]):
            assert_equal_to_eager(model, grid, device=device)
        (budgets,) = handle.refit(budgets=2).values()
        assert budgets == (24, 64)
        for grids in (GRIDS[:1], GRIDS[:2], GRIDS):
            assert_equal_to_eager(model, *grids, device=device)


def test_a_budget_for_what_was_above_them_all_grows_the_buffers(device: str) -> None:
    model, large = qwen(device), (1, 16, 20)
    with mmgraph.attach(model, CONFIG) as handle:
        assert_equal_to_eager(model, GRIDS[2], device=device)
        assert_equal_to_eager(model, large, device=device)
        hits = handle.stats().hits
        (budgets,) = handle.refit().values()
        assert budgets == (64, 320)
        for grids in ((large,), GRIDS[2:], (large, *GRIDS)):
            assert_equal_to_eager(model, *grids, device=device)
        assert handle.stats().hits == hits + 1 + 1 + 4


def test_up_front_the_missing_graphs_are_captured_at_once(device: str) -> None:
    model = qwen(device)
    config = GraphConfig(token_budgets=(64, 128), capture="upfront", compile_blocks=False)
    with mmgraph.attach(model, config) as handle:
        for grid in GRIDS:
            assert_equal_to_eager(model, grid, device=device)
        handle.refit()
        assert held(handle) == {16, 24, 64}
        graphs, padding = len(handle.stats().graphs), handle.stats().padding
        for grid in GRIDS:
            assert_equal_to_eager(model, grid, device=device)
        assert (len(handle.stats().graphs), handle.stats().padding) == (graphs, padding)


@torch.no_grad()
def test_towers_of_rows_get_the_batches_that_were_seen(device: str) -> None:
    model = clip(device)
    with mmgraph.attach(model, CONFIG) as handle:
        for rows in (3, 3, 6, 40):
            model(torch.randn(rows, 3, 56, 56, device=device))
        (budgets,) = handle.refit().values()
        # 40 rows are more than a graph of rows holds by default: 32 of them and 8.
        assert budgets == tuple(16 * rows for rows in (3, 6, 8, 32))
        for rows in (1, 3, 5, 9, 40):
            pixels = torch.randn(rows, 3, 56, 56, device=device)
            ours = model(pixels).last_hidden_state
            with eager_towers():
                eager = model(pixels).last_hidden_state
            error = float((ours - eager).norm() / eager.norm())
            assert error <= (1e-5 if device == "cpu" else 1e-3)


def test_nothing_observed_changes_nothing() -> None:
    model = qwen()
    with mmgraph.attach(model, CONFIG) as handle:
        (name,) = handle.towers
        assert handle.refit() == {name: (64, 128, 256)}
    config = GraphConfig(token_budgets=(64,), capture="upfront", max_items=1)
    with mmgraph.attach(model, config) as handle:
        graphs = handle.stats().graphs
        assert handle.refit() == {name: (64,)}
        assert handle.stats().graphs == graphs


def test_the_same_traffic_gives_the_same_budgets_and_keeps_every_graph() -> None:
    model = qwen()
    with mmgraph.attach(model, CONFIG) as handle:
        for _ in range(2):
            for grid in GRIDS:
                assert_equal_to_eager(model, grid)
            budgets = handle.refit()
        graphs = handle.stats().graphs
        assert handle.refit() == budgets
        assert handle.stats().graphs == graphs
        assert held(handle) == {16, 24, 64}


def test_without_graphs_there_are_no_budgets() -> None:
    with mmgraph.attach(qwen(), GraphConfig(enforce_eager=True)) as handle:
        assert handle.refit() == {}


def test_detached_it_fits_and_captures_nothing() -> None:
    model = qwen()
    config = GraphConfig(token_budgets=(64, 128), capture="upfront")
    with mmgraph.attach(model, config) as handle:
        assert_equal_to_eager(model, GRIDS[0])
    assert list(handle.refit().values()) == [(16,)]
    assert handle.stats().graphs == ()


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "3", (64, 128)])
def test_how_many_must_be_a_positive_integer(count: Any) -> None:
    with (
        mmgraph.attach(qwen(), CONFIG) as handle,
        pytest.raises(ConfigError, match=r"how many budgets to fit, from 1; got "),
    ):
        handle.refit(count)


def test_saved_statistics_become_a_config(tmp_path: Path) -> None:
    """The way from one process to the next: attach, save, plan, attach."""
    model, trace, out = qwen(), tmp_path / "stats.json", tmp_path / "config.json"
    with mmgraph.attach(model, CONFIG) as handle:
        for grid in GRIDS:
            assert_equal_to_eager(model, grid)
        handle.stats().save(trace)
        (fitted,) = handle.refit().values()
    assert cli.main(["plan", str(trace), "--out", str(out)]) == 0
    config = GraphConfig.from_file(out)
    assert config.token_budgets == fitted
    with mmgraph.attach(model, config) as handle:
        for grid in GRIDS:
            assert_equal_to_eager(model, grid)
        assert handle.stats().padding == 0


def sizes_of(grids: Sequence[tuple[int, int, int]]) -> list[int]:
    return [t * h * w for t, h, w in grids]


def test_calls_are_counted_by_size_whatever_served_them() -> None:
    model = qwen()
    with mmgraph.attach(model, GraphConfig(token_budgets=(32,), max_items=1)) as handle:
        for grids in (GRIDS[:1], GRIDS[:1], GRIDS):  # a capture, a replay, and partly eager
            assert_equal_to_eager(model, *grids)
        stats = handle.stats()
        assert stats.call_sizes == {16: 2, sum(sizes_of(GRIDS)): 1}
        assert stats.item_sizes == {16: 3, 24: 1, 64: 1}
