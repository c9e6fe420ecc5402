"""Images of one size in models of text and images: each row is one image."""

from __future__ import annotations

from typing import Any

import torch

from tests.registry.entries.shared import GEMMA3N, PHI4_MULTIMODAL
from tests.registry.entry import Entry, Inputs
from tests.registry.inputs.flat import flattened
from tests.registry.inputs.images import pixels

__all__ = ["ENTRIES"]

_SIDE_56 = {"vision_config.image_size": 56}
_SIDE_64 = {"vision_config.image_size": 64}


def _rows(model: str, inputs: Inputs, **fields: Any) -> Entry:
    return Entry(name=fields.pop("name", model), model=model, inputs=inputs, **fields)


ENTRIES = [
    _rows("llava", pixels(56), config=_SIDE_56),
    _rows("vipllava", pixels(56), config={**_SIDE_56, "vision_feature_layers": [-2, -1]}),
    _rows("internvl", pixels(56), config={"vision_config.image_size": [56, 56]}),
    _rows("qianfan_ocr", pixels(56), config={"vision_config.image_size": [56, 56]}),
    _rows("gemma3", pixels(64), config={**_SIDE_64, "mm_tokens_per_image": 4}),
    _rows("paligemma", pixels(56), config=_SIDE_56),
    _rows(
        "llama4",
        pixels(56),
        config={
            **_SIDE_56,
            "vision_config.projector_input_dim": 64,
            "vision_config.projector_output_dim": 64,
            "vision_config.vision_output_dim": 64,
            "vision_config.intermediate_size": 256,
        },
        model_class="Llama4ForConditionalGeneration",
        through="tower",
    ),
    _rows("deepseek_vl", pixels(64), config=_SIDE_64),
    _rows(
        "deepseek_vl_hybrid",
        pixels(64, extra=lambda n, draw: {"high_res_pixel_values": draw(n, 3, 64, 64)}),
        config={
            **_SIDE_64,
            "high_res_vision_config.image_size": 64,
            "high_res_vision_config.window_size": 2,
            "high_res_vision_config.global_attn_indexes": [1],
        },
        tower="vision_model",
    ),
    _rows(
        "ovis2", pixels(56), config={**_SIDE_56, "hidden_size": 64, "vision_config.vocab_size": 64}
    ),
    _rows("aya_vision", pixels(56), config=_SIDE_56),
    _rows("cohere2_vision", pixels(64), config={**_SIDE_64, "alignment_intermediate_size": 128}),
    _rows(
        "florence2",
        pixels(64),
        config={
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
    ),
    _rows(
        "blip-2",
        pixels(56),
        name="blip_2",
        config={
            **_SIDE_56,
            "qformer_config.encoder_hidden_size": 64,
            "num_query_tokens": 4,
            "text_config.word_embed_proj_dim": 64,
        },
        model_class="Blip2ForConditionalGeneration",
    ),
    _rows(
        "instructblip",
        pixels(
            56,
            extra=lambda n, draw: {
                "qformer_input_ids": torch.full((n, 6), 7),
                "qformer_attention_mask": torch.ones(n, 6, dtype=torch.int64),
            },
        ),
        config={
            **_SIDE_56,
            "qformer_config.encoder_hidden_size": 64,
            "num_query_tokens": 4,
            "text_config.word_embed_proj_dim": 64,
        },
        model_class="InstructBlipForConditionalGeneration",
    ),
    _rows(
        "janus",
        pixels(64),
        config={
            **_SIDE_64,
            "vision_config.projection_dim": 64,
            "vision_config.num_image_tokens": 16,
            "vq_config.base_channels": 32,
        },
        tower="vision_model",
    ),
    _rows(
        "got_ocr2",
        pixels(128, items=1),
        config={
            "vision_config.image_size": 128,
            "vision_config.global_attn_indexes": [1],
            "vision_config.window_size": 4,
        },
        budget=2,
    ),
    _rows(
        "fast_vlm",
        pixels(64),
        start={"vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_t8"}},
        config={
            "vision_config.model_args": {"layers": [1] * 4, "embed_dims": [16, 16, 32, 32]},
            "vision_config.hidden_size": 64,
        },
        budget=2,
    ),
    _rows(
        "gemma3n",
        pixels(64),
        config=GEMMA3N,
        tower="vision_tower",
        budget=2,
    ),
    _rows(
        "phi4_multimodal",
        pixels(
            56,
            extra=lambda n, draw: {"patch_attention_mask": torch.ones(n, 4, 4, dtype=torch.bool)},
        ),
        config=PHI4_MULTIMODAL,
        through="tower",
        tower="embed_tokens_extend.image_embed.img_processor",
    ),
    _rows(
        "aria",
        pixels(56),
        config={
            **_SIDE_56,
            "vision_config.patch_size": 14,
            "projector_patch_to_query_dict": {16: 4},
        },
    ),
    _rows("kosmos-2", pixels(56), config={**_SIDE_56, "latent_query_num": 4}),
    _rows("kosmos-2.5", flattened(16, 64), config={"latent_query_num": 4}, through="tower"),
    _rows(
        "pix2struct_vision_model",
        flattened(16, 64, mask=True),
        model_class="Pix2StructVisionModel",
        through="tower",
    ),
    _rows("git", pixels(56), config=_SIDE_56, through="tower", model_class="GitModel"),
    _rows("t5gemma2", pixels(56), config={"encoder.vision_config.image_size": 56}, through="tower"),
    _rows(
        "idefics",
        pixels(56),
        config={**_SIDE_56, "use_resampler": False},
        through="tower",
    ),
    _rows(
        "video_llava",
        pixels(56, name="pixel_values_images"),
        config=_SIDE_56,
        tower="image_tower",
    ),
    _rows(
        "instructblipvideo",
        pixels(56),
        modality="video",
        config={**_SIDE_56, "qformer_config.encoder_hidden_size": 64},
        through="tower",
    ),
    _rows(
        "colpali",
        pixels(56),
        config={"vlm_config.vision_config.image_size": 56},
        model_class="ColPaliForRetrieval",
        through="tower",
    ),
]
