"""Encoders of pixels that are models of their own, and the image half of contrastive models."""

from __future__ import annotations

from typing import Any

from tests.registry.entry import Entry, Inputs
from tests.registry.inputs.images import pixels

__all__ = ["ENTRIES"]


def _alone(model: str, side: int, **fields: Any) -> Entry:
    inputs: Inputs = fields.pop("inputs", None) or pixels(side)
    config = {"image_size": side, **fields.pop("config", {})}
    return Entry(name=model, model=model, inputs=inputs, config=config, through="tower", **fields)


def _pair(model: str, tower: str, part: str = "vision_config", **fields: Any) -> Entry:
    """A contrastive model of text and images."""
    inputs: Inputs = fields.pop("inputs", None) or pixels(64)
    config = {f"{part}.image_size": 64, f"{part}.patch_size": 16, **fields.pop("config", {})}
    return Entry(name=model, model=model, inputs=inputs, config=config, tower=tower, **fields)


_TRANSFORMERS = [
    _alone("clip_vision_model", 56, config={"patch_size": 14}),
    _alone("siglip_vision_model", 64),
    _alone("vit", 64),
    _alone("deit", 64),
    _alone("beit", 64),
    _alone("vit_msn", 64),
    _alone("vitdet", 64, config={"window_size": 2, "window_block_indices": [0]}),
    _alone("data2vec-vision", 64),
    _alone("ijepa", 64),
    _alone("dinov2", 56),
    _alone("dinov2_with_registers", 56),
    _alone("dinov3_vit", 64),
    _alone("aimv2_vision_model", 56),
    _alone("mlcd_vision_model", 56, config={"patch_size": 14}),
    _alone("radio", 64),
    _alone("pixio", 64),
    _alone("sapiens2", 64, config={"num_key_value_heads_per_layer": [4, 4]}),
    _alone("tipsv2_vision_model", 56),
    _alone(
        "sam_vision_model", 128, config={"global_attn_indexes": [1], "window_size": 4}, budget=2
    ),
    _alone("sam3_vit_model", 64),
]
_HIERARCHIES = [
    _alone(
        "swin",
        64,
        config={"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4},
    ),
    _alone(
        "swinv2",
        64,
        config={"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4},
    ),
    _alone(
        "hiera",
        64,
        config={
            "image_size": [64, 64],
            "depths": [1, 1],
            "num_heads": [1, 2],
            "embed_dim": 16,
            "num_query_pool": 1,
        },
    ),
    _alone("convnext", 64, config={"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16]}),
    _alone("convnextv2", 64, config={"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16]}),
    _alone("dinov3_convnext", 64, config={"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16]}),
    _alone(
        "resnet",
        64,
        config={"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16], "embedding_size": 8},
    ),
    _alone("segformer", 64, config={"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16]}),
]
_PAIRS = [
    _pair("clip", "vision_model"),
    _pair("siglip", "vision_model"),
    _pair("altclip", "vision_model"),
    _pair("chinese_clip", "vision_model"),
    _pair("metaclip_2", "vision_model"),
    _pair("clipseg", "vision_model"),
    _pair("owlvit", "vision_model"),
    _pair("owlv2", "vision_model"),
    _pair("blip", "vision_model"),
    _pair("tipsv2", "vision_model"),
    _pair("groupvit", "vision_model"),
    _pair("flava", "image_model", part="image_config"),
    _pair(
        "align",
        "vision_model",
        config={"vision_config.depth_coefficient": 0.5, "vision_config.width_coefficient": 0.5},
    ),
]
_SEGMENTERS = [
    Entry(
        name="sam2",
        model="sam2",
        inputs=pixels(64),
        config={
            "vision_config.backbone_config.image_size": [64, 64],
            "vision_config.backbone_config.hidden_size": 16,
            "vision_config.backbone_config.embed_dim_per_stage": [16, 32, 64, 128],
            "vision_config.backbone_config.num_attention_heads_per_stage": [1, 2, 4, 8],
            "vision_config.backbone_config.blocks_per_stage": [1, 1, 1, 1],
            "vision_config.backbone_channel_list": [128, 64, 32, 16],
            "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "vision_config.fpn_hidden_size": 64,
        },
        tower="vision_encoder",
        budget=2,
    ),
    Entry(
        name="sam3_vision_model",
        model="sam3_vision_model",
        inputs=pixels(64),
        config={"backbone_config.image_size": 64, "fpn_hidden_size": 32},
        through="tower",
        budget=2,
    ),
]
ENTRIES = [*_TRANSFORMERS, *_HIERARCHIES, *_PAIRS, *_SEGMENTERS]
