"""Tiles, crops and views of images, and frames of videos: several rows are one item."""

from __future__ import annotations

from typing import Any

import torch

from tests.registry.entry import Entry, Inputs
from tests.registry.inputs.audio import windows
from tests.registry.inputs.images import aspect_tiles, crops, tiles, with_locals

__all__ = ["ENTRIES"]

_SIDE_36 = {"vision_config.image_size": 36}
_SIDE_56 = {"vision_config.image_size": 56}
_SIDE_64 = {"vision_config.image_size": 64}
_FRAMES = "pixel_values_videos"
_ORIGINALS = ((100, 100), (60, 110))
_TILED = {**_SIDE_56, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
_PERCEIVER = {"perceiver_config.resampler_n_latents": 4, "perceiver_config.resampler_depth": 1}
_IDEFICS = {**_SIDE_64, "vision_config.patch_size": 16}


def _rows(model: str, inputs: Inputs, **fields: Any) -> Entry:
    return Entry(name=fields.pop("name", model), model=model, inputs=inputs, **fields)


ENTRIES = [
    _rows("llava_next", tiles(56, 5, originals=_ORIGINALS), config=_TILED),
    _rows("llava_onevision", tiles(56, 5, originals=_ORIGINALS), config=_TILED),
    _rows(
        "granite4_vision",
        tiles(56, 5, originals=_ORIGINALS),
        start={
            "text_config": {"model_type": "granite"},
            "vision_config": {"model_type": "clip_vision_model"},
        },
        config={
            **_TILED,
            "vision_config.patch_size": 14,
            "qformer_config.encoder_hidden_size": 64,
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [1],
        },
    ),
    _rows(
        "llava_onevision",
        tiles(56, 4, name=_FRAMES, kind="frames"),
        name="llava_onevision/video",
        modality="video",
        config=_TILED,
    ),
    _rows(
        "llava_next_video",
        tiles(56, 4, name=_FRAMES, kind="frames"),
        name="llava_next_video/video",
        modality="video",
        config={**_SIDE_56, "spatial_pool_stride": 2},
    ),
    _rows("smolvlm", tiles(64, 3), config=_IDEFICS),
    _rows("idefics3", tiles(64, 3), config=_IDEFICS),
    _rows("idefics2", tiles(64, 2), config={**_IDEFICS, **_PERCEIVER}),
    _rows("modernvbert", tiles(64, 3), config=_IDEFICS),
    _rows(
        "perception_lm",
        tiles(64, 2),
        start={
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_tiny_patch16_384",
                "do_pooling": False,
                "model_args": {
                    "img_size": [64, 64],
                    "depth": 2,
                    "embed_dim": 192,
                    "global_pool": "",
                },
            }
        },
        config={"vision_config.hidden_size": 192, "projector_pooling_ratio": 2},
    ),
    _rows(
        "step3p7",
        with_locals(56, 56, ((2,), (1,))),
        config={**_SIDE_56, "vision_config.max_position_embeddings": 64},
    ),
    _rows(
        "deepseek_ocr2",
        with_locals(64, 64, ((2,), (1,)), as_list=False),
        config={
            "vision_config.sam_config.image_size": 64,
            "vision_config.sam_config.window_size": 2,
            "vision_config.sam_config.global_attn_indexes": [1],
            "vision_config.sam_config.downsample_channels": [32, 64],
            "text_config.mlp_layer_types": ["dense", "sparse"],
        },
        budget=2,
    ),
    _rows(
        "unlimited_ocr",
        with_locals(64, 64, ((2,), (1,)), grids=True),
        config={
            "vision_config.sam_config.image_size": 64,
            "vision_config.sam_config.window_size": 2,
            "vision_config.sam_config.global_attn_indexes": [1],
            "vision_config.sam_config.downsample_channels": [32, 64],
            "vision_config.encoder_config.image_size": 14,
        },
        budget=2,
        since="5.24",
    ),
    _rows(
        "molmo2",
        crops(16, 14, 4),
        config={
            "vision_config.image_size": [56, 56],
            "vision_config.num_position_embeddings": 16,
            "adapter_config.vision_feature_layer": [1, 0],
            "adapter_config.text_hidden_size": 64,
        },
        since="5.24",
    ),
    _rows(
        "mllama",
        aspect_tiles(56, 4),
        config={
            **_SIDE_56,
            "vision_config.num_global_layers": 1,
            "vision_config.intermediate_layers_indices": [0, 1],
            "vision_config.vision_output_dim": 192,
            "text_config.cross_attention_layers": [1],
        },
        through="tower",
    ),
    _rows(
        "video_llava",
        tiles(56, 4, name=_FRAMES, kind="frames"),
        name="video_llava/video",
        modality="video",
        config=_SIDE_56,
        tower="video_tower",
    ),
    _rows(
        "videoprism",
        tiles(36, 4, name=_FRAMES, kind="frames"),
        modality="video",
        config={**_SIDE_36, "vision_config.num_frames": 4},
    ),
    _rows(
        "vjepa2",
        tiles(64, 4, name=_FRAMES, kind="frames"),
        modality="video",
        config={
            "crop_size": 64,
            "image_size": 64,
            "frames_per_clip": 4,
            "pred_hidden_size": 64,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 2,
        },
        through="tower",
    ),
    _rows(
        "videomae",
        tiles(64, 4, kind="frames"),
        modality="video",
        config={"image_size": 64, "num_frames": 4},
        through="tower",
    ),
    _rows(
        "vivit",
        tiles(64, 4, kind="frames"),
        modality="video",
        config={"image_size": 64, "num_frames": 4, "tubelet_size": [2, 16, 16]},
        through="tower",
    ),
    _rows(
        "timesformer",
        tiles(64, 4, kind="frames"),
        config={"image_size": 64, "num_frames": 4},
        through="tower",
    ),
    _rows(
        "xclip",
        tiles(64, 4, kind="frames"),
        modality="video",
        config={**_SIDE_64, "vision_config.num_frames": 4},
    ),
    _rows(
        "pe_video",
        tiles(64, 4, name=_FRAMES, kind="frames"),
        modality="video",
        config={
            "video_config.vision_config.architecture": "vit_pe_core_tiny_patch16_384",
            "video_config.vision_config.model_args": {"img_size": [64, 64], "depth": 2},
        },
        through="tower",
    ),
    _rows("ultravbert", tiles(64, 3), config=_IDEFICS, since="5.24"),
    _rows(
        "granite_docling",
        tiles(
            64,
            3,
            extra=lambda n, draw: {"pixel_attention_mask": torch.ones(n, 3, dtype=torch.bool)},
        ),
        config={
            **_SIDE_64,
            "vision_config.out_hidden_size": 64,
            "vision_config.deepstack_visual_indexes": [0],
        },
        since="5.24",
    ),
    _rows(
        "inkling_mm_model",
        windows(2, 40, 40, 3, name="pixel_values", kind="frames"),
        tower="vision_tower",
    ),
]
