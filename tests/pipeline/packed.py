"""Models whose tower takes the patches of all pictures end to end."""

from __future__ import annotations

from typing import Any

import torch

from tests.pipeline.architectures import Architecture
from tests.pipeline.media import frames, patches
from tests.pipeline.tiny import rope

TYPES = "mm_token_type_ids"
OUT: dict[str, Any] = {"vision_config.out_hidden_size": 64}
WINDOWS: dict[str, Any] = {
    **OUT,
    **rope(2, 3, 3),
    "vision_config.window_size": 56,
    "vision_config.fullatt_block_indexes": [1],
}
_QWEN3: dict[str, Any] = {
    **OUT,
    **rope(2, 3, 3),
    "vision_config.deepstack_visual_indexes": [0],
    "vision_config.num_position_embeddings": 64,
}
_GLM = {**OUT, **rope(2, 3, 3), "vision_config.image_size": 112}
_P14, _P16 = 3 * 2 * 14 * 14, 3 * 2 * 16 * 16

PACKED = (
    Architecture(
        type="qwen2_vl",
        model="Qwen2VLForConditionalGeneration",
        changes={"vision_config.embed_dim": 64, **rope(2, 3, 3)},
        media={"images": patches((_P14,)), "video": frames((_P14,))},
        types=TYPES,
        seed=1,
        quick=("video",),
    ),
    Architecture(
        type="qwen2_5_vl",
        model="Qwen2_5_VLForConditionalGeneration",
        changes=WINDOWS,
        media={"images": patches((_P14,)), "video": frames((_P14,))},
        types=TYPES,
        seed=4,
        quick=("images",),
    ),
    Architecture(
        type="qwen3_vl",
        model="Qwen3VLForConditionalGeneration",
        changes=_QWEN3,
        media={"images": patches((_P16,)), "video": frames((_P16,), by_frame=True)},
        types=TYPES,
        seed=1,
        quick=("video",),
    ),
    Architecture(
        type="qwen3_vl_moe",
        model="Qwen3VLMoeForConditionalGeneration",
        changes=_QWEN3,
        media={"images": patches((_P16,))},
        types=TYPES,
    ),
    Architecture(
        type="qwen3_5",
        model="Qwen3_5ForConditionalGeneration",
        changes={
            **OUT,
            "vision_config.num_position_embeddings": 64,
            "text_config.layer_types": ["linear_attention", "full_attention"],
        },
        media={"images": patches((_P16,)), "video": frames((_P16,), by_frame=True)},
        types=TYPES,
        seed=1,
    ),
    Architecture(
        type="glm4v",
        model="Glm4vForConditionalGeneration",
        changes=_GLM,
        media={"images": patches((_P14,))},
        types=TYPES,
        seed=1,
        quick=("images",),
    ),
    Architecture(
        type="glm46v",
        model="Glm46VForConditionalGeneration",
        changes=_GLM,
        media={"images": patches((_P14,))},
        types=TYPES,
        seed=1,
    ),
    Architecture(
        type="glm_ocr",
        model="GlmOcrForConditionalGeneration",
        changes=_GLM,
        media={"images": patches((_P14,))},
        types=TYPES,
        seed=3,
    ),
    Architecture(
        type="ernie4_5_vl_moe",
        model="Ernie4_5_VLMoeForConditionalGeneration",
        changes={**rope(3, 3, 2), "text_config.moe_k": 2},
        media={"images": patches((588,)), "video": frames((588,), merge=8)},
        types=TYPES,
        seed=2,
        quick=("images",),
    ),
    Architecture(
        type="paddleocr_vl",
        model="PaddleOCRVLForConditionalGeneration",
        changes={"vision_config.image_size": 112, **rope(2, 3, 3)},
        media={"images": patches((3, 14, 14))},
        exact=("images",),
        types=TYPES,
        seed=1,
        quick=("images",),
    ),
    Architecture(
        type="kimi_k25",
        model="Kimi_K25ForConditionalGeneration",
        changes={
            "vision_config.pos_emb_height": 8,
            "vision_config.pos_emb_width": 8,
            "projection_hidden_size": 64,
            "text_config.qk_rope_head_dim": 16,
            "text_config.qk_nope_head_dim": 16,
        },
        media={"images": patches((3, 14, 14)), "video": frames((3, 14, 14), merge=8)},
        exact=("images", "video"),
        since={"video": (5, 24)},
        seed=1,
        quick=("images",),
    ),
    Architecture(
        type="exaone4_5",
        model="Exaone4_5_ForConditionalGeneration",
        changes=OUT,
        media={"images": patches((_P14,)), "video": frames((_P14,))},
        seed=5,
    ),
    Architecture(
        type="video_llama_3",
        model="VideoLlama3ForConditionalGeneration",
        media={
            "images": patches((768,), more={"image_merge_sizes": torch.tensor([2, 2])}),
            "video": frames((768,), more={"video_merge_sizes": torch.tensor([2])}),
        },
        exact=("images", "video"),
        quick=("images",),
    ),
)
