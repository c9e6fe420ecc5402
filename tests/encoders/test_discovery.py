"""Discovery: the tower that a recipe names is what is found, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmgraph.encoders import PackedEncoder, RowsEncoder, encoder_for, find_towers
from mmgraph.recipes import list_recipes, load_recipe

TINY = [name for name in list_recipes() if name.endswith(":tiny")]


@pytest.mark.parametrize("name", TINY)
def test_the_tower_of_every_recipe_is_found(name: str) -> None:
    recipe = load_recipe(name)
    model = recipe.build_model(device="meta")
    (tower,) = find_towers(model)
    assert tower.name == recipe.encoder_path
    assert tower.module is recipe.encoder_of(model)
    assert tower.layout == recipe.layout
    assert tower.modalities == recipe.modalities
    expected = {"timm": ("forward", "forward_features")}.get(recipe.library, ("forward",))
    assert tower.methods == expected


@pytest.mark.parametrize("name", TINY)
def test_a_tower_alone_is_found_as_the_model_itself(name: str) -> None:
    recipe = load_recipe(name)
    encoder = recipe.build_encoder(device="meta")
    (tower,) = find_towers(encoder)
    assert (tower.name, tower.module, tower.layout) == ("", encoder, recipe.layout)


@pytest.mark.parametrize(
    ("name", "method", "kind", "expected"),
    [
        ("qwen3_vl:tiny", "forward", PackedEncoder, "model.visual"),  # by its path
        ("vit:tiny", "forward", RowsEncoder, "ViTModel"),  # by its class where it is the model
        ("timm:tiny", "forward_features", RowsEncoder, "VisionTransformer.forward_features"),
    ],
)
def test_the_encoder_of_a_tower_fits_its_layout_and_has_its_name(
    name: str, method: str, kind: type, expected: str
) -> None:
    (tower,) = find_towers(load_recipe(name).build_model(device="meta"))
    encoder = encoder_for(tower, method)
    assert type(encoder) is kind
    assert encoder.name == encoder.encoder_facts().name == expected


def test_a_model_of_text_has_no_tower() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    assert find_towers(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))) == []


@pytest.mark.parametrize(
    ("model_type", "name", "class_name", "modalities"),
    [
        ("granite_speech", "encoder", "GraniteSpeechCTCEncoder", ("audio",)),
        ("florence2", "vision_tower", "Florence2VisionBackbone", ("image",)),
        ("gemma3n_audio", "", "Gemma3nAudioEncoder", ("audio",)),
        ("videoprism_vision_model", "", "VideoPrismVisionModel", ("video",)),
        ("vjepa2", "", "VJEPA2Model", ("video",)),
    ],
)
def test_towers_with_inputs_of_other_names_are_found(
    model_type: str, name: str, class_name: str, modalities: tuple[str, ...]
) -> None:
    model = _of_type(model_type)
    tower, *resamplers = find_towers(model)
    assert (tower.name, type(tower.module).__name__) == (name, class_name)
    assert (tower.layout, tower.modalities) == ("rows", modalities)
    assert all(resampler.main_input for resampler in resamplers)


def test_the_vision_tower_of_pix2struct_takes_flattened_patches() -> None:
    from transformers import Pix2StructForConditionalGeneration

    with torch.device("meta"):
        model = Pix2StructForConditionalGeneration(CONFIG_MAPPING["pix2struct"]())
    (tower,) = find_towers(model)
    assert (tower.name, tower.layout, tower.modalities) == ("encoder", "rows", ("image",))


def test_the_parts_behind_an_embedding_are_no_towers() -> None:
    """A decoder or head takes hidden_states of an encoder, and one takes positions besides."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTEncoder
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5Decoder

    for part, model_type in ((SpeechT5Decoder, "speecht5"), (DINOv3ViTEncoder, "dinov3_vit")):
        with torch.device("meta"):
            model = part(CONFIG_MAPPING[model_type]())
        assert find_towers(model) == []


def test_a_class_that_says_it_takes_text_or_says_nothing_is_no_tower() -> None:
    from transformers import PreTrainedModel, ViTConfig

    class Silent(PreTrainedModel):
        config_class = ViTConfig

        def forward(self, hidden_states: object, mask: object) -> object:
            return hidden_states

    class WithText(Silent):
        input_modalities = ("audio", "text")

    class Audio(Silent):
        input_modalities = "audio"

    assert find_towers(Silent(ViTConfig())) == find_towers(WithText(ViTConfig())) == []
    assert [tower.modalities for tower in find_towers(Audio(ViTConfig()))] == [("audio",)]


def _of_type(model_type: str) -> nn.Module:
    """The base model of a type of transformers with the defaults of its class, on meta."""
    from transformers import AutoModel

    with torch.device("meta"):
        model: nn.Module = AutoModel.from_config(CONFIG_MAPPING[model_type]())
    return model


class TakesPixels(nn.Module):
    """A layer of somebody's, called as a tower is, but without a config."""

    def forward(self, pixel_values: object) -> object:
        return pixel_values


class Configured(TakesPixels):
    """The same with a config, as other libraries have one too."""

    config = object()


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), nn.Sequential(nn.ReLU()), TakesPixels(), Configured()]
)
def test_a_plain_module_has_no_tower(module: nn.Module) -> None:
    assert find_towers(module) == []


def test_a_tower_deep_inside_a_plain_module_is_found_once() -> None:
    encoder = load_recipe("vit:tiny").build_encoder(device="meta")
    (tower,) = find_towers(nn.ModuleDict({"stack": nn.Sequential(encoder), "head": nn.ReLU()}))
    assert (tower.name, tower.module) == ("stack.0", encoder)


def test_a_tower_inside_a_tower_is_part_of_it() -> None:
    from transformers import PreTrainedModel, ViTConfig

    class Outer(PreTrainedModel):
        config_class = ViTConfig

        def __init__(self, config: ViTConfig) -> None:
            super().__init__(config)
            self.inner = load_recipe("vit:tiny").build_encoder(device="meta")

        def forward(self, pixel_values: object) -> object:
            return self.inner(pixel_values)

    outer = Outer(ViTConfig())
    assert [tower.module for tower in find_towers(outer)] == [outer]
    assert [tower.name for tower in find_towers(nn.ModuleDict({"a": outer}))] == ["a"]


def test_two_towers_are_found_outermost_first() -> None:
    vision, audio = (
        load_recipe(n).build_model(device="meta") for n in ("vit:tiny", "whisper:tiny")
    )
    towers = find_towers(nn.ModuleDict({"a": vision, "b": audio}))
    assert [(t.name, t.modalities) for t in towers] == [
        ("a", ("image",)),
        ("b.model.encoder", ("audio",)),
    ]
    assert towers[1].module is audio.model.encoder


@pytest.mark.parametrize(
    ("model_type", "path", "main_input"),
    [
        ("blip-2", "qformer", "query_embeds"),
        ("instructblip", "qformer", "query_embeds"),
        ("idefics2", "connector.perceiver_resampler", "context"),
    ],
)
def test_what_resamples_a_towers_output_is_a_tower_of_rows(
    model_type: str, path: str, main_input: str
) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type]())
    vision, resampler = find_towers(model)
    assert "vision" in vision.name
    assert resampler.name.endswith(path)
    assert (resampler.layout, resampler.main_input) == ("rows", main_input)
    assert resampler.modalities == vision.modalities
