"""Whole models: the same logits, ids and features attached and detached, through every door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmgraph
from mmgraph import GraphConfig
from mmgraph.recipes import load_recipe
from tests.prompts import image_prompt, video_prompt

VLMS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v"),
    *("llava", "internvl", "gemma3", "paligemma"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(token_budgets=(64, 128), row_budgets=(1, 2, 4), max_items=4)
THREE = ((1, 4, 6), (1, 6, 4), (1, 4, 4))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Model:
    """A tiny model on a device, in float32: the ids of random weights must not hang on rounding."""

    def __init__(self, family: str, device: str) -> None:
        self.recipe = load_recipe(f"{family}:tiny")
        self.model: Any = self.recipe.build_model(device=device)
        self.device = device

    def move(self, prompt: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in prompt.items()}

    def generate(self, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)


@pytest.fixture(scope="module", params=VLMS)
def vlm(request: pytest.FixtureRequest, device: str) -> Model:
    return Model(str(request.param), device)


@pytest.mark.parametrize("grids", [THREE[:1], THREE], ids=["one image", "three images"])
def test_generate_gives_the_same_ids(vlm: Model, grids: Any) -> None:
    prompt = vlm.move(image_prompt(vlm.recipe, grids))
    detached = vlm.generate(prompt)
    with mmgraph.attach(vlm.model, CONFIG) as handle:
        attached = vlm.generate(prompt)
        stats = handle.stats()
    assert torch.equal(attached, detached)
    assert stats.hits == stats.items == len(grids)
    assert stats.calls == 1


@torch.no_grad()
def test_forward_gives_the_same_logits(vlm: Model) -> None:
    prompt = vlm.move(image_prompt(vlm.recipe, THREE))
    detached = vlm.model(**prompt).logits
    with mmgraph.attach(vlm.model, CONFIG) as handle:
        attached = vlm.model(**prompt).logits
        assert handle.stats().hits == 3
    torch.testing.assert_close(attached, detached, rtol=1e-4, atol=1e-4)


def test_capture_up_front_knows_how_the_model_calls_its_tower(vlm: Model) -> None:
    """LLaVA asks its tower for hidden states, for example: those graphs must be the ones there."""
    prompt = vlm.move(image_prompt(vlm.recipe, THREE[:2]))
    detached = vlm.generate(prompt)
    config = GraphConfig(token_budgets=(64,), row_budgets=(2,), max_items=2, capture="upfront")
    with mmgraph.attach(vlm.model, config) as handle:
        graphs = len(handle.stats().graphs)
        attached = vlm.generate(prompt)
        stats = handle.stats()
    assert torch.equal(attached, detached)
    assert len(stats.graphs) == graphs > 0
    assert stats.hits == stats.items == 2


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_two_modalities_in_one_call(family: str, device: str) -> None:
    vlm = Model(family, device)
    prompt = vlm.move(video_prompt(vlm.recipe))
    detached = vlm.generate(prompt)
    with mmgraph.attach(vlm.model, CONFIG) as handle:
        attached = vlm.generate(prompt)
        stats = handle.stats()
    assert torch.equal(attached, detached)
    assert stats.hits == stats.items == 2
    assert stats.calls == 2


@torch.no_grad()
def test_a_runner_serves_a_model_without_feature_functions(device: str) -> None:
    """Whisper has none: its encoder is called."""
    recipe = load_recipe("whisper:tiny")
    model = recipe.build_model(device=device, dtype=torch.float32)
    encoder = model.model.encoder
    shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    clips = torch.randn(shape, device=device)
    expected = encoder(clips).last_hidden_state
    with mmgraph.attach(model, CONFIG) as handle:
        items = [("audio", {"input_features": clip[None]}) for clip in clips]
        outputs = handle.runner().execute_mm_encoder(items)
        assert handle.stats().hits == 2
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-3, atol=1e-3)


def test_whisper_generates_from_a_captured_encoder(device: str) -> None:
    whisper = Model("whisper", device)
    features = torch.randn(2, 128, 128, device=device)
    arguments = {"max_new_tokens": 4, "do_sample": False}
    detached = whisper.model.generate(features, **arguments)
    with mmgraph.attach(whisper.model, CONFIG) as handle:
        attached = whisper.model.generate(features, **arguments)
        stats = handle.stats()
    assert torch.equal(attached, detached)
    assert stats.hits == stats.items == 2


def photo(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def words_tokenizer(special: list[str]) -> Any:
    """A tokenizer of a few words, since none can be downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "what", "is", "this", *special]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )


@pytest.fixture
def llava_pipeline(device: str) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor, pipeline

    recipe = load_recipe("llava:tiny")
    model = recipe.build_model(device=device)
    tokenizer = words_tokenizer(["<image>"])
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    model.model.config.image_token_id = model.config.image_token_id
    side = model.config.vision_config.image_size
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer,
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    return pipeline("image-text-to-text", model=model, processor=processor, device=device)


def test_the_pipeline_goes_through_graphs(llava_pipeline: Any) -> None:
    arguments = {
        "images": photo(90, 60),
        "text": "<image> what is this",
        "generate_kwargs": {"max_new_tokens": 4, "do_sample": False},
    }
    detached = llava_pipeline(**arguments)
    with mmgraph.attach(llava_pipeline) as handle:
        attached = llava_pipeline(**arguments)
        assert handle.stats().hits == handle.stats().items == 1
    assert attached == detached


def test_an_image_feature_pipeline_goes_through_graphs(device: str) -> None:
    from transformers import ViTImageProcessor, pipeline

    model = load_recipe("vit:tiny").build_model(device=device)
    side = model.config.image_size
    processor = ViTImageProcessor(size={"height": side, "width": side})
    extract = pipeline(
        "image-feature-extraction", model=model, image_processor=processor, device=device
    )
    detached = extract(photo(90, 60))
    with mmgraph.attach(model) as handle:
        attached = extract(photo(90, 60))
        assert handle.stats().hits == 1
    np.testing.assert_allclose(attached, detached, rtol=1e-4, atol=1e-5)


def test_a_runner_over_a_model_encodes_items_of_two_modalities(device: str) -> None:
    vlm = Model("qwen2_5_vl", device)
    vision = vlm.model.config.vision_config
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2

    def item(names: tuple[str, str], grid: list[int]) -> dict[str, torch.Tensor]:
        rows = grid[0] * grid[1] * grid[2]
        pixels = torch.randn(rows, patch, device=device)
        return {names[0]: pixels, names[1]: torch.tensor(grid, device=device)}

    image, video = ("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")
    items = [
        ("image", item(image, [1, 4, 6])),
        ("image", item(image, [1, 4, 4])),
        ("video", item(video, [2, 4, 4])),
        ("image", item(image, [1, 8, 8])),
    ]
    with mmgraph.attach(vlm.model, CONFIG) as handle:
        outputs = handle.runner(timing=True).execute_mm_encoder(items)
        assert handle.stats().hits == 4
        eager = mmgraph.EncoderRunner(handle.runner().model).execute_mm_encoder(items)
        assert handle.stats().items == 4
    assert [tuple(o.shape) for o in outputs] == [(6, 64), (4, 64), (8, 64), (16, 64)]
    for a, b in zip(outputs, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_report_says_what_happened(device: str) -> None:
    vlm = Model("llava", device)
    with mmgraph.attach(vlm.model, GraphConfig(row_budgets=(2,))) as handle:
        vlm.generate(vlm.move(image_prompt(vlm.recipe)))
        vlm.model.train()
        vlm.model.get_image_features(torch.randn(3, 3, 56, 56, device=device))
        report = handle.report()
    assert "mmgraph on LlavaForConditionalGeneration" in report
    assert "model.vision_tower: 2 calls, 4 items" in report
    assert "replayed  1 items in 1 replays, 50 % of 32 tokens padding" in report
    assert "eager     3 items: the encoder is in training mode" in report
    assert "32 tokens: 1 replays" in report
