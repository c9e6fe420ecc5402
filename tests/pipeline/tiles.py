"""Models that hand several tiles or frames of one picture to their tower."""

from __future__ import annotations

from typing import Any

import torch

from tests.pipeline.architectures import Architecture
from tests.pipeline.fixed import SIDE
from tests.pipeline.media import pixels, video
from tests.pipeline.tiny import IMAGE

_PINPOINTS: dict[str, Any] = {
    **SIDE,
    "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
}
_WHOLE_AND_FOUR = pixels(
    *(2, 5, 3, 56, 56),
    tokens=(88, 52),
    more={"image_sizes": torch.tensor([[100, 100], [60, 110]])},
)
_SHUFFLED = pixels(1, 3, 3, 56, 56, tokens=(4, 4, 4))
_PERCEPTION = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_core_tiny_patch16_384",
    "do_pooling": False,
    "model_args": {"img_size": [64, 64], "depth": 2, "global_pool": "", "embed_dim": 192},
}

TILES = (
    Architecture(
        type="llava_next",
        model="LlavaNextForConditionalGeneration",
        changes=_PINPOINTS,
        media={"images": _WHOLE_AND_FOUR},
        seed=4,
        quick=("images",),
    ),
    Architecture(
        type="llava_next_video",
        model="LlavaNextVideoForConditionalGeneration",
        changes={**_PINPOINTS, "spatial_pool_stride": 2},
        media={"images": _WHOLE_AND_FOUR, "video": video(1, 4, 3, 56, 56, tokens=(16,))},
        seed=7,
    ),
    Architecture(
        type="llava_onevision",
        model="LlavaOnevisionForConditionalGeneration",
        changes=_PINPOINTS,
        media={"images": _WHOLE_AND_FOUR, "video": video(1, 4, 3, 56, 56, tokens=(17,))},
        seed=3,
        quick=("video",),
    ),
    Architecture(
        type="idefics2",
        model="Idefics2ForConditionalGeneration",
        changes={
            **SIDE,
            "perceiver_config.resampler_n_latents": 4,
            "perceiver_config.resampler_depth": 1,
        },
        media={"images": pixels(1, 2, 3, 56, 56, tokens=(4, 4))},
        seed=1,
        quick=("images",),
        once_exact=("images",),
    ),
    Architecture(
        type="idefics3",
        model="Idefics3ForConditionalGeneration",
        changes=SIDE,
        media={"images": _SHUFFLED},
        once_exact=("images",),
    ),
    Architecture(
        type="smolvlm",
        model="SmolVLMForConditionalGeneration",
        changes=SIDE,
        media={"images": _SHUFFLED},
        broken={"images": (5, 20)},  # takes the width of a patch for the tokens of an image
        quick=("images",),
        once_exact=("images",),
    ),
    Architecture(
        type="mllama",
        model="MllamaForConditionalGeneration",
        changes={
            **SIDE,
            "vision_config.num_global_layers": 1,
            "vision_config.intermediate_layers_indices": [0, 1],
            "vision_config.vision_output_dim": 192,
            "vision_config.attention_heads": 4,
            "text_config.cross_attention_layers": [1],
        },
        media={
            "images": pixels(
                *(1, 2, 4, 3, 56, 56),
                tokens=(1, 1),
                token=IMAGE,
                more={
                    "aspect_ratio_ids": torch.tensor([[6, 2]]),
                    "aspect_ratio_mask": torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0]]]),
                },
            )
        },
        seed=2,
        quick=("images",),
    ),
    Architecture(
        type="perception_lm",
        model="PerceptionLMForConditionalGeneration",
        defaults={"vision_config": _PERCEPTION},
        changes={"projector_pooling_ratio": 2},
        media={
            "images": pixels(1, 2, 3, 64, 64, tokens=(8,)),
            "video": video(1, 3, 3, 64, 64, tokens=(12,)),
        },
        seed=3,
    ),
)
