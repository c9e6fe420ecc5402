"""Why budgets can't serve an encoder yet, in words; shown where they don't."""

from __future__ import annotations

__all__ = ["NOTES"]

_BY_IMAGE = "it loops over grid_thw: positions and patches are handled image by image"
_POOLED = "it loops over grid_thw: positions are interpolated and frames pooled item by item"
_WINDOWS_TOO = "it loops over grid_thw to put windows in order and to merge patches"
_PIXTRAL = "it crops each image to its image_sizes, which it reads on the host"
_NAVIT = "all patches are one row, and it loops over target_sizes"
_RESIZED = "positions are resized for each image to its spatial_shapes, which it reads on the host"
_FRAMES = "clips are cut into chunks whose number follows from their lengths"

NOTES: dict[str, str] = {
    "paddleocr_vl": "patches come with a dimension of 1 in front",
    "kimi_k25": _POOLED,
    "kimi_k25/video": _POOLED,
    "minimax_m3_vl": "it packs along dimension 1 and pools all items into one row",
    "hunyuan_vl": _BY_IMAGE,
    "hy_v4_vl": _BY_IMAGE,
    "lfm3_vl": "it runs a convolution over each image by itself",
    "cosmos3_edge": "it loops over grid_thw to cut patches into images",
    "muse_glimmer": _WINDOWS_TOO,
    "muse_spark": _WINDOWS_TOO,
    "video_llama_3": "merge_sizes come with each call and decide shapes",
    "inkling2": "its grids are called image_grid_thw and count merged patches",
    "inkling2_loop": "its grids are called image_grid_thw and count merged patches",
    "minicpmv4_6": _NAVIT,
    "minicpmv4_7": _NAVIT,
    "minicpm_ocr": _NAVIT,
    "mistral3": _PIXTRAL,
    "mistral_large4": _PIXTRAL,
    "lighton_ocr": _PIXTRAL,
    "llava+pixtral": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "siglip2": _RESIZED,
    "siglip2_vision_model": _RESIZED,
    "lfm2_vl": _RESIZED,
    "gemma4": "its last step drops padding by a mask, so the number of rows follows from positions",
    "timm/naflexvit_base_patch16_siglip": "it reads coordinates on the host to resize positions",
    "timm/naflexvit_base_patch16_gap": "it reads coordinates on the host to resize positions",
    "phi4_multimodal": "with a mask that masks nothing it attends in another way",
    "xclip": "frames of a clip attend to each other, so rows aren't independent",
    "qwen2_5_omni/audio": _FRAMES,
    "qwen3_omni_moe/audio": _FRAMES,
    "qwen3_asr": _FRAMES,
    "dots3_note/audio": _FRAMES,
}
