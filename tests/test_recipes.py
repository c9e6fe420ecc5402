"""Recipes: every name builds, with sane random weights; tiny vision-language models generate."""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import recipes
from mmgraph.bench.inputs import tower_inputs
from mmgraph.errors import ConfigError, UnsupportedModelError
from mmgraph.recipes import Recipe, families, list_recipes, load_recipe
from tests.prompts import image_prompt

TINY = [name for name in list_recipes() if name.endswith(":tiny")]
RELEASED = [name for name in list_recipes() if not name.endswith(":tiny")]
TOWER_IN_MODEL = [name for name in TINY if load_recipe(name).encoder_path]
DECLARED = [name for name in TINY if load_recipe(name).inputs]
PACKED, ROWS = (
    [name for name in TINY if load_recipe(name).layout == layout and name not in DECLARED]
    for layout in ("packed", "rows")
)
PROMPTED = [name for name in TOWER_IN_MODEL if name not in (*DECLARED, "whisper:tiny")]
FEATURE_ARGUMENTS = {
    "grid_thw": "image_grid_thw",
    "merge_sizes": "image_merge_sizes",
    "pixel_position_ids": "image_position_ids",
}
REWRITTEN = (
    *("rope_parameters", "num_experts"),  # completed, renamed
    *("global_head_dim", "num_global_key_value_heads"),  # become a config of single layers
)
MODELS = Path(__file__).parents[1] / "models"


def assert_sane(module: nn.Module) -> None:
    assert not any(part.training for part in module.modules())
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert not parameter.numel() or parameter.abs().max() > 1e-3, name
        assert parameter.dim() < 2 or parameter.max() > parameter.min(), name


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).norm() / before.norm())


def test_importing_recipes_loads_no_model_library() -> None:
    code = (
        "import sys, mmgraph.recipes as r; r.load_recipe(r.list_recipes()[0]); "
        "print([name for name in ('transformers', 'timm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_family_has_a_card_that_names_its_recipes() -> None:
    assert len(set(list_recipes())) == len(list_recipes())
    for family in families():
        recipe = json.loads((MODELS / family / "recipe.json").read_text(encoding="utf-8"))
        assert recipe["family"] == family
        card = (MODELS / family / "README.md").read_text(encoding="utf-8")
        assert all(name in card for name in list_recipes() if load_recipe(name).family == family)


def test_an_installed_package_finds_the_recipes_inside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(MODELS / "clip", tmp_path / "mmgraph" / "_models" / "clip")
    shutil.copytree(MODELS / "vit", tmp_path / "models" / "vit")  # someone else's folder
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "mmgraph" / "recipes.py"))
    assert list_recipes() == ["clip-l-336", "clip:tiny"]


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("qwen2.5-vl-72b", "'qwen2.5-vl-7b'"),  # another size of a known family
        ("clip:tinny", "'clip:tiny'"),  # a typo
        ("?", "'clip-l-336'"),  # nothing close: all of them
    ],
)
def test_an_unknown_name_lists_the_close_ones(name: str, close: str) -> None:
    with pytest.raises(ConfigError, match="no recipe is named") as caught:
        load_recipe(name)
    assert close in str(caught.value)


def test_a_class_that_the_library_lacks_says_what_to_install() -> None:
    recipe = Recipe(
        name="x",
        family="x",
        library="transformers",
        layout="rows",
        feature_methods={"image": "forward"},
        model_class="transformers.NoSuchModel",
        config_class="transformers.NoSuchConfig",
        overrides={},
    )
    with pytest.raises(UnsupportedModelError, match="install or upgrade transformers"):
        recipe.config()


@pytest.mark.parametrize("name", list_recipes())
def test_config_is_new_each_time_and_holds_the_overrides(name: str) -> None:
    recipe = load_recipe(name)
    before = copy.deepcopy(recipe.overrides)
    config = recipe.config()
    assert config is not recipe.config()
    assert recipe.overrides == before
    values = config if isinstance(config, dict) else config.to_dict()
    for key, value in recipe.overrides.items():
        if not isinstance(value, dict):
            assert values[key] == value
            continue
        for inner, inner_value in value.items():
            if inner not in REWRITTEN:
                assert values[key][inner] == inner_value, (key, inner)


@pytest.mark.parametrize("name", RELEASED)
def test_released_encoder_has_the_expected_size(name: str) -> None:
    recipe = load_recipe(name)
    encoder = recipe.build_encoder(device="meta", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.bfloat16}
    millions = sum(parameter.numel() for parameter in encoder.parameters()) / 1e6
    assert millions == pytest.approx(recipe.encoder_parameters_m, rel=0.03)


@pytest.mark.parametrize("name", TINY)
def test_tiny_encoder_and_model_are_sane_and_leave_ambient_state_alone(name: str) -> None:
    recipe = load_recipe(name)
    recipe.config()  # imports of the library happen here
    state = torch.get_rng_state()
    encoder, model = recipe.build_encoder(), recipe.build_model()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert_sane(encoder)
    assert_sane(model)


@pytest.mark.parametrize("name", TINY)
def test_the_library_leaves_no_parameter_uninitialised(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a parameter can hold anything, so that filling the blank ones would not see it."""
    monkeypatch.setattr(recipes, "_fill_blank_parameters", lambda _: None)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        model = load_recipe(name).build_model()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [key for key, value in model.state_dict().items() if torch.isnan(value).any()] == []


@pytest.mark.parametrize("name", TINY)
def test_the_seed_decides_the_weights(name: str) -> None:
    recipe = load_recipe(name)
    first, again, other = (recipe.build_encoder(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not all(torch.equal(value, other[key]) for key, value in first.items())


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiny_encoder_is_built_in_half_precision(name: str, dtype: torch.dtype) -> None:
    encoder = load_recipe(name).build_encoder(dtype=dtype)
    assert {parameter.dtype for parameter in encoder.parameters()} == {dtype}
    assert_sane(encoder)


@pytest.mark.parametrize("name", PACKED)
def test_tiny_packed_encoder_feels_segments_and_grid(name: str) -> None:
    """With weights so small that attention hardly matters, wrong metadata would pass for right."""
    encoder = load_recipe(name).build_encoder()
    vision = encoder.config
    patches = torch.randn(
        48,
        3 * vision.temporal_patch_size * vision.patch_size**2,
        generator=torch.Generator().manual_seed(1),
    )
    with torch.inference_mode():
        one, two, wide = (
            encoder(patches, grid_thw=torch.tensor(grid)).pooler_output
            for grid in ([[1, 8, 6]], [[1, 4, 6], [1, 4, 6]], [[1, 6, 8]])
        )
    assert one.shape == two.shape == (12, 64)
    assert relative_change(one, two) > 1e-2
    assert relative_change(one, wide) > 1e-2


@pytest.mark.parametrize("name", ROWS)
def test_tiny_rows_encoder_mixes_the_tokens_of_a_row(name: str) -> None:
    recipe = load_recipe(name)
    encoder = recipe.build_encoder()
    size = getattr(getattr(encoder, "config", None), "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    shape = (2, 128, 128) if recipe.family == "whisper" else (2, 3, height, width)
    row = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    changed = row.clone()
    changed[0, ..., -14:] *= -1  # the last column of patches, the end of the clip
    tokens = encoder.forward_features if recipe.library == "timm" else encoder
    with torch.inference_mode():
        before, after = (
            out if isinstance(out, torch.Tensor) else out.last_hidden_state
            for out in (tokens(row), tokens(changed))
        )
    assert torch.isfinite(before).all()
    assert relative_change(before[0, 0], after[0, 0]) > 1e-3
    torch.testing.assert_close(before[1], after[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECLARED)
def test_tiny_encoder_with_declared_inputs_mixes_the_tokens_of_an_item(name: str) -> None:
    recipe = load_recipe(name)
    encoder = recipe.build_encoder()
    items = [(90,), (150,)] if recipe.modalities == ("audio",) else [(1, 12, 6), (1, 6, 12)]
    generator = torch.Generator().manual_seed(1)
    call = tower_inputs(recipe, encoder.config, items, generator=generator)
    first = next(iter(call))
    changed = {**call, first: call[first].clone()}
    changed[first][_end_of_first_item(recipe, encoder.config, items[0])] *= -1
    with torch.inference_mode():
        before, after = (
            encoder(**arguments).last_hidden_state.flatten(0, -2) for arguments in (call, changed)
        )
    assert torch.isfinite(before).all()
    assert relative_change(before[0], after[0]) > 1e-3
    torch.testing.assert_close(before[-1], after[-1], rtol=1e-5, atol=1e-5)


def _end_of_first_item(recipe: Recipe, config: Any, item: tuple[int, ...]) -> Any:
    """Index of its second half in the main input."""
    count = math.prod(item)
    return {
        "mel": lambda: (0, slice(None), slice(count // 2, count)),
        "padded_patches": lambda: (0, slice(count // 2, count)),
        "patches": lambda: slice(count // 2, count),
        "pixels": lambda: (0, slice(None), slice(item[1] // 2 * config.patch_size, None)),
    }[next(iter(recipe.inputs.values()))]()


def test_a_failed_build_restores_the_default_dtype_and_the_generator() -> None:
    recipe = load_recipe("clip:tiny")
    broken = replace(recipe, overrides={**recipe.overrides, "hidden_act": "no such activation"})
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="no such activation"):
        broken.build_encoder(dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TOWER_IN_MODEL)
def test_encoder_is_built_as_the_model_holds_it(name: str) -> None:
    recipe = load_recipe(name)
    alone, held = recipe.build_encoder(), recipe.encoder_of(recipe.build_model())
    assert type(alone) is type(held)
    assert alone.config.to_dict() == held.config.to_dict()
    assert alone.config._attn_implementation == held.config._attn_implementation == "sdpa"
    shapes = [
        {key: value.shape for key, value in tower.state_dict().items()} for tower in (alone, held)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", PROMPTED)
def test_tiny_vision_language_model_generates_and_sees_the_image(name: str) -> None:
    recipe = load_recipe(name)
    model = recipe.build_model()
    prompt = image_prompt(recipe)
    calls: list[int] = []
    recipe.encoder_of(model).register_forward_hook(lambda *_: calls.append(1))
    tokens = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, prompt["input_ids"].shape[1] + 3)
    assert len(calls) == 1
    with torch.inference_mode():
        seen = model(**prompt).logits[:, -1]
        prompt["pixel_values"] = -prompt["pixel_values"]
        assert relative_change(seen, model(**prompt).logits[:, -1]) > 1e-3


@pytest.mark.parametrize("name", DECLARED)
def test_tiny_model_with_declared_inputs_generates_and_sees_them(name: str) -> None:
    recipe = load_recipe(name)
    model = recipe.build_model()
    prompt = declared_prompt(recipe, model)
    calls: list[int] = []
    recipe.encoder_of(model).register_forward_hook(lambda *_: calls.append(1))
    tokens = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, prompt["input_ids"].shape[1] + 3)
    assert len(calls) == 1
    main = next(key for key in prompt if key in recipe.inputs)
    with torch.inference_mode():
        seen = model(**prompt).logits[:, -1]
        prompt[main] = -prompt[main]
        assert relative_change(seen, model(**prompt).logits[:, -1]) > 1e-3


def declared_prompt(recipe: Recipe, model: nn.Module) -> dict[str, torch.Tensor]:
    """Two items and a few words, with as many placeholders as the model has features."""
    audio = recipe.modalities == ("audio",)
    items = [(90,), (150,)] if audio else [(1, 12, 6), (1, 6, 12)]
    call = tower_inputs(recipe, recipe.encoder_of(model).config, items)
    named = {FEATURE_ARGUMENTS.get(name, name): value for name, value in call.items()}
    method = next(iter(recipe.feature_methods.values()))
    with torch.inference_mode():
        features = getattr(model, method)(**named).pooler_output
    count = len(features) if isinstance(features, torch.Tensor) else sum(map(len, features))
    config = model.config
    token = config.audio_token_id if audio else config.image_token_id
    ids = torch.tensor([[1, 990, *[token] * count, 991, 5, 6, 7]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **named}


def test_tiny_whisper_generates() -> None:
    recipe = load_recipe("whisper:tiny")
    model = recipe.build_model()
    calls: list[int] = []
    recipe.encoder_of(model).register_forward_hook(lambda *_: calls.append(1))
    features = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(1))
    tokens = model.generate(features, max_new_tokens=3, do_sample=False)
    assert tokens.shape[0] == 1
    assert tokens.shape[1] >= 1
    assert len(calls) == 1
