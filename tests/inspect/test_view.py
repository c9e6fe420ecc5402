"""What is told of a tower, and of modules that are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmgraph.config import GraphConfig
from mmgraph.encoders import encoder_for, find_towers
from mmgraph.inspect import TowerView, inspect_model
from mmgraph.inspect.source import resolve
from mmgraph.inspect.text import render
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.preparation.align import AlignedWeights
from mmgraph.recipes import load_recipe


def view_of(name: str, *, towers: int = 1) -> TowerView:
    """The first of a model's towers; what resamples its output comes after it."""
    views = inspect_model(resolve(name).build(), name).towers
    assert len(views) == towers
    return views[0]


def test_a_packed_tower_of_a_released_size() -> None:
    view = view_of("qwen2.5-vl-7b")
    assert (view.layout, view.modalities, view.methods) == (
        "packed",
        ("image", "video"),
        ("forward",),
    )
    assert [(a.name, a.required) for a in view.arguments] == [
        ("hidden_states", True),
        ("grid_thw", True),
    ]
    assert (view.capture, view.blocks) == ("budgets", 32)
    assert (view.padded_layers, view.padded_widths) == (96, {3420: 3456})
    assert view.num_bytes == 2 * view.parameters > 1e9
    assert view.placement is None  # that there are no weights is no fault of the model
    assert "keep grid_thw on the CPU" in view.advice[0]


def test_padding_depends_on_the_dtype() -> None:
    (view,) = inspect_model(resolve("qwen2.5-vl-7b").build(dtype=torch.float32)).towers
    assert (view.padded_layers, view.dtype) == (0, "float32")


def test_buffers_are_those_of_a_capture() -> None:
    encoder = encoder_for(find_towers(load_recipe("vit:tiny").build_encoder())[0])
    (view,) = inspect_model(encoder.tower.module).towers
    config = GraphConfig(backend="trace", row_budgets=(32,))
    manager = EncoderCudaGraphManager(config, encoder.device, encoder.dtype, encoder)
    manager.capture()
    assert (view.budgets[0].tokens, view.budgets[-1].tokens) == (16, *manager.budgets)
    arenas = manager._store.arenas.values()
    assert view.buffer_bytes == sum(arena.num_bytes for arena in arenas)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("video_llama_3:tiny", "merge_sizes"),
        ("mistral3:tiny", "image_sizes"),
        ("gemma4:tiny", "pixel_position_ids"),
    ],
)
def test_a_tower_with_sizes_of_its_own_has_graphs_of_exact_calls(name: str, argument: str) -> None:
    view = view_of(name)
    assert view.capture == "exact"
    assert argument in view.why
    assert any('mode="piecewise"' in line for line in view.advice)
    assert view.budgets == ()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kimi_k25", "reads values"),
        ("minimax_m3_vl", ""),  # it packs along dimension 1; in 5.17 something else is in the way
        ("paddleocr_vl", "doesn't run for a budget"),
    ],
)
def test_a_dry_run_on_meta_shows_what_no_budget_can_serve(name: str, why: str) -> None:
    view = view_of(name)
    assert (view.layout, view.capture, view.budgets) == ("packed", "exact", ())
    assert why in view.why


def test_a_mask_that_is_looked_into_only_outside_captures_is_no_obstacle() -> None:
    view = view_of("idefics2", towers=2)
    assert view.capture == "budgets"
    if not view.budgets:  # transformers 5.17 counts patches there, in a capture as well
        assert "nonzero" in str(view.no_budgets)


def test_a_tower_that_needs_more_than_an_example_holds_has_no_ladder() -> None:
    view = view_of("mllama")
    assert (view.capture, view.budgets) == ("budgets", ())
    assert view.no_budgets is not None
    assert "aspect_ratio_ids" in view.no_budgets


def test_a_tower_whose_input_size_is_unknown_has_no_ladder() -> None:
    view = view_of("granite_speech", towers=2)
    assert (view.capture, view.budgets) == ("budgets", ())
    assert view.no_budgets is not None
    assert "capture='lazy'" in view.no_budgets


def test_looking_leaves_the_model_as_it_is() -> None:
    encoder = nn.ModuleDict({"a": load_recipe("siglip:tiny").build_encoder()})
    # A width that a capture would pad.
    encoder["a"].odd = nn.Linear(257, 256)
    before = {n: (p.data_ptr(), p.stride()) for n, p in encoder.named_parameters()}
    (view,) = inspect_model(encoder).towers
    assert view.padded_widths == AlignedWeights(nn.Sequential(nn.Linear(257, 256))).widths != {}
    assert {n: (p.data_ptr(), p.stride()) for n, p in encoder.named_parameters()} == before


def test_shared_weights_are_named_and_not_padded() -> None:
    encoder = load_recipe("vit:tiny").build_encoder()
    encoder.one, encoder.two = nn.Linear(257, 256), nn.Linear(257, 256)
    encoder.two.weight = encoder.one.weight
    (view,) = inspect_model(encoder).towers
    assert view.shared == ("one.weight",)
    assert view.padded_layers == 0


def test_an_offloaded_tower_is_eager_and_says_so() -> None:
    encoder = load_recipe("vit:tiny").build_encoder()
    encoder._hf_hook = SimpleNamespace(offload=True)
    inspection = inspect_model(encoder)
    (view,) = inspection.towers
    assert view.capture == "eager"
    assert view.placement is not None
    assert "accelerate" in view.placement
    assert "nothing: it runs in eager mode: accelerate" in render(inspection)


class Pixels(nn.Module):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values


class Configured(Pixels):
    config = SimpleNamespace()


def test_modules_that_take_pixels_and_are_no_tower_are_named_with_the_reason() -> None:
    inspection = inspect_model(nn.ModuleDict({"a": Pixels(), "b": Configured(), "c": Pixels()}))
    assert [(c.name, c.takes) for c in inspection.candidates] == [
        ("a", ("pixel_values",)),
        ("b", ("pixel_values",)),
    ]
    assert "no config" in inspection.candidates[0].why_not
    assert "no PreTrainedModel" in inspection.candidates[1].why_not
    assert "no tower found" in render(inspection)


def test_a_model_of_text_and_pixels_at_once_says_that_it_takes_text() -> None:
    inspection = inspect_model(resolve("layoutlmv3").build(), "layoutlmv3")
    assert inspection.towers == ()
    assert inspection.candidates[0].name == ""
    assert "text as well (input_ids)" in inspection.candidates[0].why_not
