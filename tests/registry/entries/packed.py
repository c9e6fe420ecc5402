"""Towers of packed patches: images and videos of any size, end to end."""

from __future__ import annotations

from typing import Any

import torch

from tests.registry.entries.shared import DOTS3_NOTE, MUSE_SPARK, QWEN2_5_OMNI, QWEN3_OMNI
from tests.registry.entry import Entry
from tests.registry.inputs.patches import VIDEOS, canvas, packed, strip

__all__ = ["ENTRIES"]

_BUDGET = 128
_VIDEO_NAMES = ("pixel_values_videos", "video_grid_thw")
_OUT = {"vision_config.out_hidden_size": 64}
_WINDOWS = {**_OUT, "vision_config.window_size": 56, "vision_config.fullatt_block_indexes": [1]}
_TABLE = {**_OUT, "vision_config.num_position_embeddings": 64}
_DEEPSTACK = {**_TABLE, "vision_config.deepstack_visual_indexes": [0]}
_GLM = {**_OUT, "vision_config.image_size": 112}


def _image(model: str, *patch: int, name: str = "", **fields: Any) -> Entry:
    inputs = packed(*patch)
    return Entry(name=name or model, model=model, inputs=inputs, budget=_BUDGET, **fields)


def _video(model: str, *patch: int, name: str = "", **fields: Any) -> Entry:
    return Entry(
        name=f"{name or model}/video",
        model=model,
        inputs=packed(*patch, sizes=VIDEOS, names=_VIDEO_NAMES),
        modality="video",
        budget=_BUDGET,
        **fields,
    )


def _both(model: str, *patch: int, **fields: Any) -> tuple[Entry, Entry]:
    return _image(model, *patch, **fields), _video(model, *patch, **fields)


# A patch is 3 channels x frames x height x width, flat where it is one number.
_P14, _P16 = 3 * 2 * 14 * 14, 3 * 2 * 16 * 16
_ONE_FRAME_14, _ONE_FRAME_16 = 3 * 14 * 14, 3 * 16 * 16

_QWEN = [
    *_both("qwen2_vl", _P14),
    *_both("qwen2_5_vl", _P14, config=_WINDOWS),
    *_both("qwen3_vl", _P16, config=_DEEPSTACK),
    _image("qwen3_vl_moe", _P16, config=_DEEPSTACK),
    _image("qwen3_5", _P16, config=_TABLE),
    _image("qwen3_5_moe", _P16, config=_TABLE),
    _image("qwen4_exp", _P16, config=_TABLE),
    _image(
        "qwen2_5_omni_thinker",
        _P14,
        name="qwen2_5_omni",
        config=QWEN2_5_OMNI,
        model_class="Qwen2_5OmniThinkerForConditionalGeneration",
        tower="visual",
    ),
    _image(
        "qwen3_omni_moe_thinker",
        _P16,
        name="qwen3_omni_moe",
        config=QWEN3_OMNI,
        model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
        tower="visual",
    ),
    _image("exaone4_5", _P14, config=_WINDOWS),
    _image("hyperclovax_vision_v2", _P14, config=_WINDOWS, since="5.24"),
    _image("cosmos3_omni", _P16, config=_DEEPSTACK),
]
_GLM_FAMILY = [
    *_both("glm4v", _P14, config=_GLM),
    _image("glm4v_moe", _P14, config=_GLM),
    _image("glm46v", _P14, config=_GLM),
    _image("glm_ocr", _P14, config=_GLM),
    _image("glm5_next", _P14, config=_GLM),
    _image("glm_image", _ONE_FRAME_16, config={"vision_config.image_size": 128}),
]
_ERNIE = {
    "text_config.hidden_size": 512,
    "text_config.head_dim": 128,  # its rotary sections
    "text_config.moe_intermediate_size": [64, 64],
}
_KIMI = {
    "vision_config.pos_emb_height": 8,
    "vision_config.pos_emb_width": 8,
    "projection_hidden_size": 64,
}
_MINIMAX = {
    "vision_config.image_size": 112,
    "projector_hidden_size": 64,
    "merged_hidden_size": 256,
}
_HY = {"vision_config.image_size": 112, "text_config.hidden_size": 64}
_INKLING = {"vision_config.text_hidden_size": 64, "vision_config.projection_hidden_dim": 64}
_OTHERS = [
    _image("ernie4_5_vl_moe", _ONE_FRAME_14, config=_ERNIE),
    Entry(
        name="ernie4_5_vl_moe/video",
        model="ernie4_5_vl_moe",
        modality="video",
        inputs=packed(_ONE_FRAME_14, sizes=((2, 4, 6), (4, 4, 4)), names=_VIDEO_NAMES),
        config=_ERNIE,
        budget=_BUDGET,
    ),
    _image("paddleocr_vl", 3, 14, 14, config={"vision_config.image_size": 112}),
    _image("kimi_k25", 3, 14, 14, config=_KIMI),
    Entry(
        name="kimi_k25/video",
        model="kimi_k25",
        modality="video",
        inputs=packed(3, 14, 14, sizes=VIDEOS, names=_VIDEO_NAMES),
        config=_KIMI,
        budget=_BUDGET,
        since="5.24",
    ),
    _image("minimax_m3_vl", _P14, config=_MINIMAX),
    _image("hunyuan_vl", _ONE_FRAME_16, config={"text_config.head_dim": 16}),
    _image("hy_v4_vl", _ONE_FRAME_16, config=_HY, since="5.24"),
    _image("lfm3_vl", _P16, since="5.24"),
    _image(
        "cosmos3_edge",
        _ONE_FRAME_16,
        config={"text_config.hidden_size": 512, "text_config.head_dim": 128},
    ),
    _image("muse_glimmer", _P14, config={"out_hidden_size": 256, "projector_hidden_size": 256}),
    _image("muse_spark", _P14, config=MUSE_SPARK, tower="vision_tower", since="5.24"),
    _image(
        "cohere_compass",
        _P16,
        config={
            **_DEEPSTACK,
            "text_config.hidden_size": 512,  # its rotary sections
            "text_config.head_dim": 128,
            "text_config.layer_types": ["full_attention"] * 2,
            "text_config.rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4}
            },
        },
    ),
    _image("dots3_note", _ONE_FRAME_14, config=DOTS3_NOTE, tower="vision_tower", since="5.24"),
    Entry(
        name="video_llama_3",
        model="video_llama_3",
        inputs=packed(
            _ONE_FRAME_16,
            extra=lambda sizes: {"image_merge_sizes": torch.full((len(sizes),), 2)},
        ),
        budget=_BUDGET,
    ),
    Entry(
        name="inkling2",
        model="inkling2",
        inputs=packed(40, 40, 3),
        config=_INKLING,
        since="5.24",
    ),
    Entry(
        name="inkling2_loop",
        model="inkling2_loop",
        inputs=packed(40, 40, 3),
        config=_INKLING,
        since="5.24",
    ),
]
_NAVIT = ((1, 8, 12), (1, 8, 8))
_PIXTRAL = {"vision_config.image_size": 224}
_SIZES_APART = [
    Entry(
        name="minicpmv4_6",
        model="minicpmv4_6",
        inputs=strip(16, ((1, 8, 12), (1, 8, 12))),  # 5.17 takes images of one size only
        config={"vision_config.insert_layer_id": 0, "insert_layer_id": 0},
        budget=192,
    ),
    *(
        Entry(
            name=model,
            model=model,
            inputs=strip(16, _NAVIT),
            config={"vision_config.insert_layer_id": 0, "insert_layer_id": 0},
            budget=192,
            since="5.24",
        )
        for model in ("minicpmv4_7", "minicpm_ocr")
    ),
    Entry(
        name="mistral_large4",
        model="mistral_large4",
        inputs=canvas(14),
        config=_PIXTRAL,
        since="5.24",
    ),
    Entry(name="mistral3", model="mistral3", inputs=canvas(14), config=_PIXTRAL),
    Entry(name="lighton_ocr", model="lighton_ocr", inputs=canvas(14), config=_PIXTRAL),
    Entry(
        name="llava+pixtral",
        model="llava",
        inputs=canvas(14),
        start={"vision_config": {"model_type": "pixtral"}},
        config={
            **_PIXTRAL,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    Entry(
        name="pixtral",
        model="pixtral",
        inputs=canvas(14),
        config={"image_size": 224},
        through="tower",
    ),
]
ENTRIES = [*_QWEN, *_GLM_FAMILY, *_OTHERS, *_SIZES_APART]
