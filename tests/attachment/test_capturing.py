"""An attached model can be shown what will come."""

from __future__ import annotations

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig, Reason
from mmgraph.recipes import load_recipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_shown_is_served_from_then_on_and_nothing_else(device: str) -> None:
    tower = load_recipe("qwen2_vl:tiny").build_encoder(device=device, dtype=torch.float32)
    width = tower.patch_embed.proj.weight[0].numel()
    config = GraphConfig(
        token_budgets=(64, 128), max_items=1, capture="upfront", compile_blocks=False
    )

    def call(*grid: int) -> None:
        patches = torch.randn(grid[1] * grid[2], width, device=device)
        ours = tower(patches, grid_thw=torch.tensor([[*grid]])).last_hidden_state
        with mmgraph.encoders.eager_towers():
            grids = torch.tensor([[*grid]], device=device)
            eager = tower(patches, grid_thw=grids).last_hidden_state
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)

    with mmgraph.attach(tower, config) as handle:
        handle.clear()
        call(1, 8, 8)
        assert handle.stats().misses == {Reason.NOT_CAPTURED: 1}
        with handle.capturing():
            call(1, 8, 8)  # a budget
            call(1, 16, 16)  # above all of them
            assert handle.stats().hits == 2
        for _ in range(2):
            call(1, 8, 8)
            call(1, 16, 16)
        assert handle.stats().hits == 6
        call(1, 8, 12)  # 128 tokens were not shown
        for _ in range(3):
            call(1, 16, 12)
        assert handle.stats().hits == 6
        assert handle.is_captured()
        assert len(handle.stats().graphs) == 2


@torch.no_grad()
def test_an_error_ends_it() -> None:
    tower = load_recipe("clip:tiny").build_encoder()
    side = tower.config.image_size
    config = GraphConfig(row_budgets=(1, 2), capture="upfront")
    with mmgraph.attach(tower, config) as handle:
        handle.clear()
        with pytest.raises(ValueError, match="stop"), handle.capturing():
            raise ValueError("stop")
        tower(torch.randn(1, 3, side, side))
        assert handle.stats().graphs == ()
        assert not handle.is_captured()


@torch.no_grad()
def test_a_tower_whose_size_is_unknown_does_not_keep_others_from_being_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = load_recipe("gemma4:tiny").build_encoder()
    config = GraphConfig(row_budgets=(1, 2), capture="upfront")
    with pytest.raises(mmgraph.UnsupportedModelError, match="input size"):
        mmgraph.attach(unknown, config)
    model = torch.nn.ModuleDict({"known": load_recipe("clip:tiny").build_encoder(), "un": unknown})
    side = model["known"].config.image_size
    with mmgraph.attach(model, config) as handle:
        model["known"](torch.randn(2, 3, side, side))
        assert handle.stats().hits == 2
    assert caplog.text.count("isn't captured up front") == 1
