"""Prompts for the tiny vision-language models, with the tokens and keys of their processors."""

from __future__ import annotations

import torch

from mmgraph.recipes import Recipe

__all__ = ["image_prompt", "video_prompt"]

_BOS, _WORDS = 1, [5, 6, 7]
_ROW_TOKENS = {"gemma3": 4, "internvl": 4, "llava": 16, "paligemma": 16}


def image_prompt(
    recipe: Recipe, grids: tuple[tuple[int, int, int], ...] = ((1, 4, 6),)
) -> dict[str, torch.Tensor]:
    """Images and a few words.

    Args:
        recipe: A tiny vision-language model.
        grids: One (t, h, w) an image; of models with fixed-size images only the number counts.
    """
    config = recipe.config()
    vision = config.vision_config
    if recipe.layout == "packed":
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = {
            "pixel_values": torch.randn(sum(t * h * w for t, h, w in grids), patch),
            "image_grid_thw": torch.tensor(grids),
        }
        counts = [t * h * w // 4 for t, h, w in grids]
    else:
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        pixels = {"pixel_values": torch.randn(len(grids), 3, size, size)}
        counts = [_ROW_TOKENS[recipe.family]] * len(grids)
    images = [[config.image_token_id] * count for count in counts]
    bare = [token for image in images for token in image]
    fenced = [token for image in images for token in (990, *image, 991)]
    ids = {"llava": [_BOS, *bare, *_WORDS], "paligemma": [*bare, _BOS, *_WORDS]}
    input_ids = torch.tensor([ids.get(recipe.family, [_BOS, *fenced, *_WORDS])])
    types = (input_ids == config.image_token_id).long()
    extra = {
        "gemma3": {"token_type_ids": types},
        "internvl": {},
        "llava": {},
        "paligemma": {"token_type_ids": torch.zeros_like(types)},
    }.get(recipe.family, {"mm_token_type_ids": types})
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **pixels, **extra}


def video_prompt(recipe: Recipe, grid: tuple[int, int, int] = (2, 4, 6)) -> dict[str, torch.Tensor]:
    """An image, a video and a few words, for the Qwen2-VL and Qwen2.5-VL models."""
    config = recipe.config()
    prompt = image_prompt(recipe)
    t, h, w = grid
    video = torch.tensor([[990, *[config.video_token_id] * (t * h * w // 4), 991]])
    ids = torch.cat([prompt["input_ids"], video, torch.tensor([_WORDS])], dim=1)
    types = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id).long()
    return {
        **prompt,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        "pixel_values_videos": torch.randn(t * h * w, prompt["pixel_values"].shape[1]),
        "video_grid_thw": torch.tensor([grid]),
    }
