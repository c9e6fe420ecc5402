"""What a name stands for, and that nothing is downloaded or allocated for it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from mmgraph import ConfigError, UnsupportedModelError
from mmgraph.inspect import inspect_model
from mmgraph.inspect.source import resolve
from mmgraph.inspect.text import render
from mmgraph.recipes import load_recipe


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("name", "kind", "class_name", "towers"),
    [
        ("qwen2_5_vl:tiny", "a recipe", "Qwen2_5_VLForConditionalGeneration", ["model.visual"]),
        ("clip", "a model type", "CLIPModel", ["vision_model"]),
        ("qwen3_vl", "a model type", "Qwen3VLForConditionalGeneration", ["model.visual"]),
        ("llama4_vision_model", "a model type", "Llama4VisionModel", [""]),  # no auto class has it
        ("timm/vit_tiny_patch16_224.augreg_in21k", "a timm model", "VisionTransformer", [""]),
        ("resnet18", "a timm model", "ResNet", [""]),
    ],
)
def test_a_name_becomes_a_model_without_weights(
    name: str, kind: str, class_name: str, towers: list[str]
) -> None:
    source = resolve(name)
    assert source.kind.startswith(kind)
    model = source.build()
    assert type(model).__name__ == class_name
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert [tower.name for tower in inspect_model(model).towers] == towers


def test_a_folder_of_transformers_and_one_of_timm(tmp_path: Path) -> None:
    load_recipe("llava:tiny").config().save_pretrained(tmp_path / "llava")
    for path in (tmp_path / "llava", tmp_path / "llava" / "config.json"):
        (tower,) = inspect_model(resolve(str(path)).build()).towers
        assert (tower.name, tower.class_name) == ("model.vision_tower", "CLIPVisionModel")
    saved = {"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    model = resolve(str(tmp_path)).build()
    assert model.patch_embed.img_size == (64, 64)


def test_the_class_that_a_config_names_is_the_one_built(tmp_path: Path) -> None:
    config = load_recipe("vit:tiny").config()
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    inspection = inspect_model(resolve(str(tmp_path)).build())
    assert inspection.class_name == "ViTForImageClassification"
    assert [tower.name for tower in inspection.towers] == ["vit"]


def test_a_model_id_is_read_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--somebody--small-clip"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    load_recipe("clip:tiny").config().save_pretrained(repository / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    source = resolve("somebody/small-clip")
    assert source.kind == "a model in the local cache"
    assert [t.class_name for t in inspect_model(source.build()).towers] == ["CLIPVisionModel"]


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("qwen2_5_vl:tinny", "qwen2_5_vl:tiny"),
        ("qwen3_lv", "qwen3_vl"),
        ("timm/vit_base_patch16_225", "vit_base_patch16_224"),
    ],
)
def test_an_unknown_name_lists_close_ones(name: str, close: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    assert repr(close) in str(caught.value)
    assert "local Hugging Face cache" in str(caught.value)


def test_a_name_that_is_close_to_none_lists_none() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("zzzzqqqq/000111222")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json that can be read"),
        ("{", "no config.json that can be read"),
        ('{"model_type": "invented"}', "can't be used"),
        ('{"auto_map": {"AutoConfig": "a--b.C"}, "model_type": "mine"}', "can't be used"),
    ],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(str(tmp_path))


def test_a_config_that_no_class_can_be_built_from_is_no_crash(tmp_path: Path) -> None:
    config = load_recipe("vit:tiny").config()
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "invented"}))
    with pytest.raises(UnsupportedModelError, match="can't be built"):
        resolve(str(tmp_path)).build()


def test_parts_stand_in_for_a_model_whose_defaults_do_not_fit(tmp_path: Path) -> None:
    config = load_recipe("llava:tiny").config()
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    data["text_config"]["hidden_act"] = "invented"
    file.write_text(json.dumps(data))
    inspection = inspect_model(resolve(str(tmp_path)).build())
    assert [(t.name, t.class_name) for t in inspection.towers] == [
        ("vision_config", "CLIPVisionModel")
    ]
    assert "its parts can" in render(inspection)
