"""Encoders as their users call them: features, pipelines, and Whisper within `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import mmgraph
from mmgraph import Reason
from tests.pipeline.calls import counted
from tests.pipeline.compare import assert_same_output
from tests.pipeline.processors import image_processor, mel, photographs, tones, word_tokenizer
from tests.pipeline.tiny import tiny_config, tiny_model

_VIT: dict[str, Any] = {"image_size": 56, "patch_size": 14}
_DUAL: dict[str, Any] = {
    "vision_config.image_size": 56,
    "vision_config.patch_size": 14,
    "projection_dim": 64,
}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A model whose output is features.

    Attributes:
        type: Its name in transformers.
        model: Its class.
        processor: The class of its image processor.
        changes: Settings of the config that its tiny size needs, by dotted path.
        exact: Whether a graph comes with the second call only.
    """

    type: str
    model: str
    processor: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False

    def build(self, device: str) -> Any:
        return tiny_model(self.model, tiny_config(self.type, self.changes)).to(device)

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        batch = image_processor(self.processor)(photographs(), return_tensors="pt")
        return {name: tensor.to(device) for name, tensor in batch.items()}


DUAL = {
    "clip": Encoder(type="clip", model="CLIPModel", processor="CLIPImageProcessor", changes=_DUAL),
    "siglip": Encoder(
        type="siglip",
        model="SiglipModel",
        processor="SiglipImageProcessor",
        changes={**_DUAL, "text_config.projection_size": 64},
    ),
    "siglip2": Encoder(
        type="siglip2",
        model="Siglip2Model",
        processor="Siglip2ImageProcessor",
        changes={"vision_config.num_patches": 16, "vision_config.patch_size": 14},
        exact=True,
    ),
}
PLAIN = {
    "dinov2": Encoder(
        type="dinov2", model="Dinov2Model", processor="BitImageProcessor", changes=_VIT
    ),
    "dinov3": Encoder(
        type="dinov3_vit", model="DINOv3ViTModel", processor="DINOv3ViTImageProcessor", changes=_VIT
    ),
    "vit": Encoder(type="vit", model="ViTModel", processor="ViTImageProcessor", changes=_VIT),
    "convnext": Encoder(
        type="convnext",
        model="ConvNextModel",
        processor="ViTImageProcessor",
        changes={"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16]},
    ),
}
"""Built by AutoModel from their configs."""


@pytest.mark.parametrize("encoder", DUAL.values(), ids=DUAL)
@torch.no_grad()
def test_image_features_of_photographs(encoder: Encoder, device: str) -> None:
    model, inputs = encoder.build(device), encoder.inputs(device)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    calls = (inputs, other, inputs)
    expected = [model.get_image_features(**call) for call in calls]
    assert differs(expected[0], expected[1])
    with mmgraph.attach(model) as handle:
        for count, (call, eager) in enumerate(zip(calls, expected, strict=True)):
            output, how = counted(handle, lambda call=call: model.get_image_features(**call))
            assert_same_output(output, eager)
            assert how.from_graphs or (encoder.exact and count == 0), how
    assert_same_output(model.get_image_features(**inputs), expected[0])


@pytest.mark.parametrize("encoder", PLAIN.values(), ids=PLAIN)
@torch.no_grad()
def test_auto_models(encoder: Encoder, device: str) -> None:
    from transformers import AutoModel

    model = AutoModel.from_config(tiny_config(encoder.type, encoder.changes))
    model = model.eval().to(device)
    assert type(model).__name__ == encoder.model
    inputs = encoder.inputs(device)
    eager = model(**inputs)
    with mmgraph.attach(model) as handle:
        for _ in range(2):
            output, how = counted(handle, lambda: model(**inputs))
            assert how.from_graphs
            assert_same_output(output, eager)


@pytest.mark.parametrize("name", ["dinov2", "dinov3"])
@torch.no_grad()
def test_image_sizes_change_from_call_to_call(name: str, device: str) -> None:
    model = PLAIN[name].build(device)
    with mmgraph.attach(model) as handle:
        for height, width in [(56, 56), (56, 84), (70, 42), (56, 84)]:
            x = torch.randn(2, 3, height, width, device=device)
            with mmgraph.encoders.eager_towers():
                eager = model(x)
            output, how = counted(handle, lambda x=x: model(x))
            assert how.from_graphs
            assert_same_output(output, eager)
        assert len(handle.stats().graphs) == 3


@pytest.mark.parametrize(
    ("name", "together"), [("vit", 1), ("vit", 2), ("dinov2", 2), ("dinov3", 2)]
)
def test_the_image_feature_pipeline(name: str, together: int, device: str) -> None:
    from transformers import pipeline

    encoder = PLAIN[name]
    extract = pipeline(
        "image-feature-extraction",
        model=encoder.build(device),
        image_processor=image_processor(encoder.processor),
        device=device,
        batch_size=together,
    )
    arguments = {"pool": True, "return_tensors": True}
    expected = extract(photographs(), **arguments)
    assert differs(expected[0], expected[1])
    with mmgraph.attach(extract) as handle:
        output, how = counted(handle, lambda: extract(photographs(), **arguments))
        assert how.from_graphs
        assert how.hits == 3
    for ours, eager in zip(output, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_zero_shot_pipeline(name: str, device: str) -> None:
    from transformers import pipeline

    encoder = DUAL[name]
    classify = pipeline(
        "zero-shot-image-classification",
        model=encoder.build(device),
        image_processor=image_processor(encoder.processor),
        tokenizer=word_tokenizer(["This", "is", "a", "photo", "of", "cat", "coffee", "face"]),
        device=device,
    )
    arguments = {"candidate_labels": ["cat", "coffee", "face"]}
    expected = classify(photographs(), **arguments)
    with mmgraph.attach(classify) as handle:
        output, how = counted(handle, lambda: classify(photographs(), **arguments))
        assert how.from_graphs
        assert how.hits == 3
    for ours, eager in zip(output, expected, strict=True):
        assert [answer["label"] for answer in ours] == [answer["label"] for answer in eager]
        scores = [[answer["score"] for answer in answers] for answers in (ours, eager)]
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-6)
    assert expected[0] != expected[1]


def test_the_image_classification_pipeline(device: str) -> None:
    from transformers import pipeline

    model = tiny_model("ViTForImageClassification", tiny_config("vit", _VIT))
    processor = image_processor("ViTImageProcessor")
    classify = pipeline(
        "image-classification", model=model, image_processor=processor, device=device
    )
    expected = classify(photographs())
    with mmgraph.attach(classify) as handle:
        output, how = counted(handle, lambda: classify(photographs()))
        assert how.from_graphs
        assert how.hits == 3
    for ours, eager in zip(output, expected, strict=True):
        assert [answer["label"] for answer in ours] == [answer["label"] for answer in eager]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_clip_within_sentence_transformers(mode: Any, device: str) -> None:
    """Which holds a CLIPModel, and calls its tower and its projection one after the other."""
    model, inputs = DUAL["clip"].build(device), DUAL["clip"].inputs(device)

    def embed() -> torch.Tensor:
        with mode():
            return model.visual_projection(model.vision_model(**inputs)[1])

    eager = embed()
    with mmgraph.attach(model) as handle:
        output, how = counted(handle, embed)
        assert how.from_graphs
    torch.testing.assert_close(output, eager, rtol=1e-4, atol=1e-5)


def test_features_that_need_gradients_run_in_eager_mode(device: str) -> None:
    model, inputs = DUAL["clip"].build(device), DUAL["clip"].inputs(device)
    with mmgraph.attach(model) as handle:
        features, how = counted(handle, lambda: model.get_image_features(**inputs))
        assert how.misses == {Reason.GRAD: 3}
    (features if isinstance(features, torch.Tensor) else features.pooler_output).sum().backward()
    assert model.visual_projection.weight.grad is not None


def whisper(device: str) -> Any:
    positions = {"max_source_positions": 50, "max_target_positions": 64}
    model = tiny_model("WhisperForConditionalGeneration", tiny_config("whisper", positions))
    return model.to(device)


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [
        ({}, 1),
        ({"num_beams": 2}, 1),
        # longer than the window of one second: a call for each, with the sounds that are left
        ({"return_timestamps": True}, 4),
    ],
    ids=["greedy", "beams", "long"],
)
def test_whisper_hears_sounds(arguments: dict[str, Any], windows: int, device: str) -> None:
    model = whisper(device)
    if "return_timestamps" in arguments:
        model.generation_config.no_timestamps_token_id = 70  # those above it are timestamps
    lengths = [(0.4, 0.9), (1.0, 0.2)] if windows == 1 else [(2.5, 3.2), (3.2, 0.7)]
    arguments = {**arguments, "max_new_tokens": 8, "do_sample": False}
    calls = [mel(tones(*seconds), whole=windows > 1, device=device) for seconds in lengths]
    expected = [model.generate(**call, **arguments) for call in calls]
    assert not torch.equal(*(ids[:, :8] for ids in expected))
    with mmgraph.attach(model) as handle:
        for call, ids in [*zip(calls, expected, strict=True)] * 2:
            output, how = counted(handle, lambda call=call: model.generate(**call, **arguments))
            assert how.from_graphs
            assert how.calls == windows
            assert torch.equal(output, ids)
        assert len(handle.stats().graphs) <= 2  # one a batch size, whatever the length


def differs(a: Any, b: Any) -> bool:
    tensors = [x if isinstance(x, torch.Tensor) else x[0] for x in (a, b)]
    return not torch.allclose(*tensors, rtol=1e-2, atol=1e-2)
