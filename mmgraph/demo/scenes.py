"""What the demo runs: four models, each with its calls on the photographs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from mmgraph.config import GraphConfig
from mmgraph.demo.photos import pan
from mmgraph.recipes import Recipe, load_recipe

__all__ = ["Call", "Scene", "scenes"]

_WORDS = (5, 6, 7, 8)
Encode = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a model.

    Attributes:
        items: What is in it, for the table.
        encode: Runs the encoder, its inputs cast to a dtype if one is given; returns its output.
        prompt: Arguments of ``generate``, or ``None`` where there is no language model.
    """

    items: str
    encode: Encode
    prompt: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A model and its calls.

    Attributes:
        name: Name of the recipe.
        model: The whole model.
        tower: The encoder in it.
        config: How it is attached.
        calls: The calls.
    """

    name: str
    model: nn.Module
    tower: nn.Module
    config: GraphConfig
    calls: Sequence[Call]


def scenes(photos: Sequence[Image.Image], device: torch.device) -> list[Callable[[], Scene]]:
    """Return one builder a model: released sizes with random weights on CUDA, else tiny ones."""
    real = device.type == "cuda"
    dtype = torch.bfloat16 if real else torch.float32

    def build(name: str, make: Callable[..., Sequence[Call]], config: GraphConfig) -> Scene:
        recipe = load_recipe(name)
        model = recipe.build_model(device=device, dtype=dtype)
        calls = make(recipe, model, photos, _Mover(device, dtype))
        tower = recipe.encoder_of(model)
        return Scene(name=name, model=model, tower=tower, config=config, calls=calls)

    packed = GraphConfig(capture="upfront", progress=True)
    rows = GraphConfig(capture="upfront", progress=True, row_budgets=(1, 2, 4, 8))
    if not real:
        packed = GraphConfig(capture="upfront", progress=True, token_budgets=(256, 512, 1024))
    table = [
        ("qwen2.5-vl-7b" if real else "qwen2_5_vl:tiny", _qwen_calls, packed),
        ("llava-1.5-7b" if real else "llava:tiny", _llava_calls, rows),
        ("siglip-so400m-384" if real else "siglip:tiny", _siglip_calls, rows),
        ("timm-vit-b16-224" if real else "timm:tiny", _timm_calls, rows),
    ]
    return [partial(build, *entry) for entry in table]


@dataclass(frozen=True, slots=True)
class _Mover:
    """Moves what a processor made to where the model is."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else None)


def _qwen_calls(
    recipe: Recipe, model: Any, photos: Sequence[Image.Image], move: _Mover
) -> list[Call]:
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    patches = 1280 if move.device.type == "cuda" else 192
    size = {"shortest_edge": 56 * 56, "longest_edge": 14 * 14 * patches}
    process = Qwen2VLImageProcessor(size=size)
    calls = []
    for chosen in ([photo] for photo in photos), (list(photos),):
        for pictures in chosen:
            inputs = process(pictures, return_tensors="pt")
            pixels, grid = move(inputs["pixel_values"]), move(inputs["image_grid_thw"])
            prompt = _packed_prompt(model.config, pixels, grid, "image")
            calls.append(
                Call(
                    items=_sizes(pictures),
                    encode=_bind(model.model.get_image_features, pixels, grid),
                    prompt={k: move(v) for k, v in prompt.items()},
                )
            )
    frames = np.stack([np.array(frame) for frame in pan(photos[0], 6, 112)])
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    processor = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    inputs = processor([video], return_tensors="pt", do_sample_frames=False)
    pixels, grid = move(inputs["pixel_values_videos"]), move(inputs["video_grid_thw"])
    prompt = _packed_prompt(model.config, pixels, grid, "video")
    calls.append(
        Call(
            items=f"video, {len(video)} frames of 112x112",
            encode=_bind(model.model.get_video_features, pixels, grid),
            prompt={k: move(v) for k, v in prompt.items()},
        )
    )
    return calls


def _packed_prompt(
    config: Any, pixels: torch.Tensor, grid: torch.Tensor, modality: str
) -> dict[str, torch.Tensor]:
    """What a Qwen processor makes of words and pictures, without its tokenizer."""
    token = config.image_token_id if modality == "image" else config.video_token_id
    merge = config.vision_config.spatial_merge_size
    ids, types = [_WORDS[0]], [0]
    for t, h, w in grid.tolist():
        count = t * h * w // merge**2
        ids += [config.vision_start_token_id, *[token] * count, config.vision_end_token_id]
        types += [0, *[1 if modality == "image" else 2] * count, 0]
    names = {"image": ("pixel_values", "image_grid_thw")}
    first, second = names.get(modality, ("pixel_values_videos", "video_grid_thw"))
    return {
        **_text([*ids, *_WORDS]),
        "mm_token_type_ids": torch.tensor([[*types, *[0] * len(_WORDS)]]),
        first: pixels,
        second: grid,
    }


def _llava_calls(
    recipe: Recipe, model: Any, photos: Sequence[Image.Image], move: _Mover
) -> list[Call]:
    from transformers import CLIPImageProcessor

    side = model.config.vision_config.image_size
    process = CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    tokens = (side // model.config.vision_config.patch_size) ** 2
    calls = []
    for pictures in (photos[:1], photos[:3]):
        pixels = move(process(list(pictures), return_tensors="pt")["pixel_values"])
        ids = [_WORDS[0], *[model.config.image_token_id] * (tokens * len(pictures)), *_WORDS]
        prompt = {**_text(ids), "pixel_values": pixels}
        calls.append(
            Call(
                items=_sizes(pictures),
                encode=_bind(model.model.get_image_features, pixels),
                prompt={k: move(v) for k, v in prompt.items()},
            )
        )
    return calls


def _siglip_calls(
    recipe: Recipe, model: Any, photos: Sequence[Image.Image], move: _Mover
) -> list[Call]:
    from transformers import SiglipImageProcessor

    side = model.config.image_size
    process = SiglipImageProcessor(size={"height": side, "width": side})
    pixels = move(process(list(photos), return_tensors="pt")["pixel_values"])
    return [Call(items=_sizes(photos), encode=_bind(model, pixels))]


def _timm_calls(
    recipe: Recipe, model: Any, photos: Sequence[Image.Image], move: _Mover
) -> list[Call]:
    import timm

    settings = timm.data.resolve_model_data_config(model)
    settings["input_size"] = (3, *model.patch_embed.img_size)
    transform = timm.data.create_transform(**settings)
    pixels = move(torch.stack([transform(photo) for photo in photos]))
    return [
        Call(items=_sizes(photos[:1]), encode=_bind(model, pixels[:1])),
        Call(items=_sizes(photos), encode=_bind(model, pixels)),
    ]


def _bind(function: Callable[..., Any], *args: torch.Tensor) -> Encode:
    def encode(dtype: torch.dtype | None = None) -> Any:
        return function(*(x.to(dtype) if x.is_floating_point() and dtype else x for x in args))

    return encode


def _text(ids: list[int]) -> dict[str, torch.Tensor]:
    input_ids = torch.tensor([ids])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def _sizes(photos: Sequence[Image.Image]) -> str:
    if len(photos) == 1:
        return f"{photos[0].width}x{photos[0].height}"
    return f"{len(photos)} photos, " + " ".join(f"{p.width}x{p.height}" for p in photos)
