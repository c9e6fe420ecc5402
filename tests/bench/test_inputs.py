"""Declared inputs look like what the processors of transformers make of images and clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmgraph.bench.inputs import full_item, on_host, tower_inputs
from mmgraph.bench.names import DEFAULT, EAGER, EXACT
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.run import run
from mmgraph.bench.sizes import ImageSize
from mmgraph.errors import ConfigError
from mmgraph.recipes import Recipe, list_recipes, load_recipe

DECLARED = [name for name in list_recipes() if load_recipe(name).inputs]
TINY = [name for name in DECLARED if name.endswith(":tiny")]
SQUARE, WIDE = (1, 6, 6), (1, 3, 12)


def photos() -> list[Any]:
    """Two images of different shape, whose sides are no multiples of anything."""
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((301, 503), (607, 397))
    ]


def tower_config(recipe: Recipe) -> Any:
    config = recipe.config()
    return config if recipe.encoder_config is None else getattr(config, recipe.encoder_config)


def assert_alike(made: Mapping[str, torch.Tensor], real: Mapping[str, torch.Tensor]) -> None:
    """Shapes and dtypes agree, and all that is no random content does."""
    assert list(made) == list(real)
    for name, value in real.items():
        assert made[name].shape == value.shape, name
        assert made[name].dtype == value.dtype, name
        if not value.is_floating_point():
            assert torch.equal(made[name], value), name


def test_padded_patches_and_positions_are_those_of_the_image_processor() -> None:
    from transformers import Gemma4ImageProcessor

    recipe = load_recipe("gemma-4-e2b")
    real = Gemma4ImageProcessor()(photos(), return_tensors="pt")
    positions = real["image_position_ids"]
    widths_and_heights = (positions.amax(dim=1) + 1).tolist()
    made = tower_inputs(recipe, tower_config(recipe), [(1, h, w) for w, h in widths_and_heights])
    assert_alike(
        made,
        {"pixel_values": real["pixel_values"], "pixel_position_ids": real["image_position_ids"]},
    )
    beyond = (positions == -1).all(dim=-1)
    assert beyond.any(dim=1).all()
    assert not made["pixel_values"][beyond].any()
    assert 0 <= made["pixel_values"].min() <= made["pixel_values"].max() <= 1


def test_pixels_and_their_sizes_are_those_of_the_image_processor() -> None:
    from transformers import PixtralImageProcessor

    recipe = load_recipe("mistral-small-3.1-24b")
    config = tower_config(recipe)
    side = config.patch_size * recipe.input_facts["merge"]
    processor = PixtralImageProcessor(patch_size=side, size={"longest_edge": config.image_size})
    real = processor(photos(), return_tensors="pt")
    items = [(1, h, w) for h, w in (real["image_sizes"] // config.patch_size).tolist()]
    made = tower_inputs(recipe, config, items)
    assert_alike(made, real)
    for image, size in zip(made["pixel_values"], real["image_sizes"].tolist(), strict=True):
        beyond = torch.ones(image.shape[1:], dtype=torch.bool)
        beyond[: size[0], : size[1]] = False
        assert not image[:, beyond].any()
        assert image[:, ~beyond].std() > 0.9


def test_patches_with_grids_and_merges_are_those_of_the_image_processor() -> None:
    from transformers import VideoLlama3ImageProcessor

    recipe = load_recipe("videollama3-2b")
    real = VideoLlama3ImageProcessor()(photos(), return_tensors="pt")
    items = [tuple(grid) for grid in real["image_grid_thw"].tolist()]
    made = tower_inputs(recipe, tower_config(recipe), items)
    assert_alike(
        made,
        {
            "pixel_values": real["pixel_values"],
            "grid_thw": real["image_grid_thw"],
            "merge_sizes": real["image_merge_sizes"],
        },
    )


@pytest.mark.parametrize("seconds", [(2.0, 3.5), (30.0, 1.0)], ids=["short", "usual"])
def test_mel_frames_and_their_mask_are_those_of_the_feature_extractor(
    seconds: tuple[float, ...],
) -> None:
    from transformers import Qwen3ASRFeatureExtractor

    recipe = load_recipe("qwen3-asr-1.7b")
    clips = [np.ones(int(16000 * s), dtype=np.float32) for s in seconds]
    real = Qwen3ASRFeatureExtractor()(
        clips, sampling_rate=16000, padding=True, return_attention_mask=True
    )
    made = tower_inputs(recipe, tower_config(recipe), [(int(100 * s),) for s in seconds])
    assert_alike(
        made,
        {
            "input_features": real["input_features"],
            "input_features_mask": real["attention_mask"],
        },
    )


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("gemma-4-e2b", (1, 48, 48)),  # 2304 patches, the most that a square leaves of 2520
        ("gemma4:tiny", (1, 12, 12)),
        ("qwen3-asr-1.7b", (3000,)),  # 30 seconds
    ],
)
def test_a_usual_item_is_what_a_square_image_or_a_usual_clip_gives(
    name: str, item: tuple[int, ...]
) -> None:
    recipe = load_recipe(name)
    assert full_item(recipe, tower_config(recipe)) == item


def test_a_call_of_no_items_has_no_rows() -> None:
    for name in TINY:
        recipe = load_recipe(name)
        made = tower_inputs(recipe, tower_config(recipe), [])
        assert {value.shape[0] for value in made.values()} == {0}


def test_contents_follow_the_generator_and_the_dtype() -> None:
    recipe = load_recipe("gemma4:tiny")
    first, again, other = (
        tower_inputs(
            recipe,
            tower_config(recipe),
            [SQUARE, WIDE],
            dtype=torch.bfloat16,
            generator=torch.Generator().manual_seed(seed),
        )["pixel_values"]
        for seed in (0, 0, 1)
    )
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_only_sizes_are_read_on_the_host() -> None:
    expected = {
        "gemma4:tiny": set(),
        "mistral3:tiny": {"image_sizes"},
        "qwen3_asr:tiny": set(),
        "video_llama_3:tiny": {"grid_thw", "merge_sizes"},
    }
    assert {name: on_host(load_recipe(name)) for name in expected} == expected


def test_an_image_above_the_padding_is_refused() -> None:
    recipe = load_recipe("gemma4:tiny")
    with pytest.raises(ConfigError, match="pads images to 180 patches, one has 225"):
        tower_inputs(recipe, tower_config(recipe), [SQUARE, (1, 15, 15)])


def test_a_recipe_without_inputs_is_refused() -> None:
    recipe = load_recipe("clip:tiny")
    with pytest.raises(ConfigError, match="its layout, 'rows', says what it takes"):
        tower_inputs(recipe, tower_config(recipe), [SQUARE])


@pytest.mark.parametrize("name", TINY)
def test_the_bench_measures_a_tower_with_declared_inputs(name: str) -> None:
    by_image = "length" not in load_recipe(name).input_facts
    options = BenchOptions(
        device=torch.device("cpu"),
        dtype=torch.float32,
        recipes=(load_recipe(name),),
        images=(ImageSize(112), ImageSize(56, 2)),
        batches=(1, 2),
        repeats=1,
        warmup=0,
    )
    report = run(options)
    assert [row.size for row in report.rows] == (["112", "56x2"] if by_image else ["1", "2"])
    for row in report.rows:
        assert list(row.timings) == [EAGER, EXACT, DEFAULT]
        assert row.match, row


def test_a_recipe_can_be_given_another_merge() -> None:
    """Videos of the same tower are merged more than images."""
    recipe = load_recipe("video_llama_3:tiny")
    other = replace(recipe, input_facts={"merge": 1})
    items = [SQUARE, WIDE]
    assert tower_inputs(recipe, tower_config(recipe), items)["merge_sizes"].tolist() == [2, 2]
    assert tower_inputs(other, tower_config(other), items)["merge_sizes"].tolist() == [1, 1]
