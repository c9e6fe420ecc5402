"""Models whose tower takes pictures of one size, or tiles of them that are images to it."""

from __future__ import annotations

from typing import Any

import torch

from tests.pipeline.architectures import Architecture
from tests.pipeline.media import pixels, video
from tests.pipeline.tiny import IMAGE

SIDE: dict[str, Any] = {"vision_config.image_size": 56, "vision_config.patch_size": 14}
_SIDES: dict[str, Any] = {
    "vision_config.image_size": [56, 56],
    "vision_config.patch_size": [14, 14],
}
_QFORMER: dict[str, Any] = {
    **SIDE,
    "image_token_index": IMAGE,
    "num_query_tokens": 4,
    "qformer_config.encoder_hidden_size": 64,
    "text_config.word_embed_proj_dim": 64,
}
_QUESTION = {
    "qformer_input_ids": torch.tensor([[5, 6, 7, 8]]),
    "qformer_attention_mask": torch.ones(1, 4, dtype=torch.long),
}
ONE, TWO, THREE = (1, 3, 56, 56), (2, 3, 56, 56), (3, 3, 56, 56)

FIXED = (
    Architecture(
        type="llava",
        model="LlavaForConditionalGeneration",
        changes=SIDE,
        media={"images": pixels(*TWO, tokens=(16, 16))},
        seed=5,
        quick=("images",),
    ),
    Architecture(
        type="vipllava",
        model="VipLlavaForConditionalGeneration",
        changes={**SIDE, "vision_feature_layers": [-2, -1]},
        media={"images": pixels(*TWO, tokens=(16, 16))},
        seed=4,
    ),
    Architecture(
        type="video_llava",
        model="VideoLlavaForConditionalGeneration",
        changes=SIDE,
        media={
            "images": pixels(*TWO, tokens=(16, 16), name="pixel_values_images"),
            "video": video(1, 8, 3, 56, 56, tokens=(8 * 17,)),
        },
        seed=12,
        quick=("video",),
    ),
    Architecture(
        type="internvl",
        model="InternVLForConditionalGeneration",
        changes=_SIDES,
        media={"images": pixels(*THREE, tokens=(4, 8))},
        quick=("images",),
    ),
    Architecture(
        type="qianfan_ocr",
        model="QianfanOCRForConditionalGeneration",
        changes=_SIDES,
        media={"images": pixels(*THREE, tokens=(4, 8))},
    ),
    Architecture(
        type="gemma3",
        model="Gemma3ForConditionalGeneration",
        changes={**SIDE, "mm_tokens_per_image": 4},
        media={"images": pixels(*TWO, tokens=(4, 4))},
        types="token_type_ids",
        seed=1,
        quick=("images",),
    ),
    Architecture(
        type="paligemma",
        model="PaliGemmaForConditionalGeneration",
        changes={**SIDE, "vision_config.projection_dim": 64, "projection_dim": 64},
        media={"images": pixels(*TWO, tokens=(16, 16))},
        types="token_type_ids",
        quick=("images",),
    ),
    Architecture(
        type="aya_vision",
        model="AyaVisionForConditionalGeneration",
        changes=SIDE,
        media={"images": pixels(*THREE, tokens=(4, 8))},
        quick=("images",),
    ),
    Architecture(
        type="cohere2_vision",
        model="Cohere2VisionForConditionalGeneration",
        changes={**SIDE, "alignment_intermediate_size": 128},
        media={"images": pixels(*THREE, tokens=(4, 8))},
    ),
    Architecture(
        type="blip-2",
        model="Blip2ForConditionalGeneration",
        changes=_QFORMER,
        media={"images": pixels(*ONE, tokens=(4,))},
        quick=("images",),
    ),
    Architecture(
        type="instructblip",
        model="InstructBlipForConditionalGeneration",
        changes=_QFORMER,
        media={"images": pixels(*ONE, tokens=(4,), more=_QUESTION)},
    ),
    Architecture(
        type="kosmos-2",
        model="Kosmos2ForConditionalGeneration",
        changes={**SIDE, "latent_query_num": 4},
        media={"images": pixels(*ONE, tokens=(4,))},
        types="image_embeds_position_mask",
        seed=1,
    ),
    Architecture(
        type="janus",
        model="JanusForConditionalGeneration",
        changes={
            **SIDE,
            "vision_config.projection_dim": 64,
            "vision_config.num_image_tokens": 16,
            "vq_config.base_channels": 32,
            "vq_config.channel_multiplier": [1],
        },
        media={"images": pixels(*TWO, tokens=(16, 16))},
        seed=7,
    ),
    Architecture(
        type="deepseek_vl",
        model="DeepseekVLForConditionalGeneration",
        changes=SIDE,
        media={"images": pixels(*TWO, tokens=(16, 16))},
        seed=1,
        quick=("images",),
    ),
    Architecture(
        type="ovis2",
        model="Ovis2ForConditionalGeneration",
        changes={**SIDE, "hidden_size": 64, "vision_config.vocab_size": 64},
        media={"images": pixels(*TWO, tokens=(16, 16))},
        seed=2,
        quick=("images",),
    ),
    Architecture(
        type="got_ocr2",
        model="GotOcr2ForConditionalGeneration",
        changes={
            "vision_config.image_size": 256,
            "vision_config.global_attn_indexes": [1],
            "vision_config.window_size": 7,
        },
        media={"images": pixels(1, 3, 256, 256, tokens=(16,))},
    ),
    Architecture(
        type="florence2",
        model="Florence2ForConditionalGeneration",
        changes={
            "vision_config.depths": [1, 1],
            "vision_config.patch_size": [7, 3],
            "vision_config.patch_stride": [4, 2],
            "vision_config.patch_padding": [3, 1],
            "vision_config.patch_prenorm": [False, True],
            "vision_config.embed_dim": [32, 64],
            "vision_config.num_heads": [4, 4],
            "vision_config.num_groups": [4, 4],
            "vision_config.projection_dim": 64,
            "vision_config.window_size": 4,
        },
        media={"images": pixels(1, 3, 64, 64, tokens=(65,))},
    ),
    Architecture(
        type="aria",
        model="AriaForConditionalGeneration",
        changes={**SIDE, "projector_patch_to_query_dict": {16: 4}},
        media={"images": pixels(*TWO, tokens=(4, 4))},
        seed=1,
        once_exact=("images",),
    ),
    Architecture(
        type="git",
        model="GitForCausalLM",
        changes=SIDE,
        media={"images": pixels(*ONE)},
        asked="besides",
    ),
    Architecture(
        type="blip",
        model="BlipForConditionalGeneration",
        changes=SIDE,
        media={"images": pixels(*ONE)},
        asked="besides",
        seed=1,
    ),
)
