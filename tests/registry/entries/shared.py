"""Configs of models that hold several encoders: each is built once for all of them."""

from __future__ import annotations

from typing import Any

from tests.registry.shrink import LEFT_OUT

__all__ = [
    "DOTS3_NOTE",
    "GEMMA3N",
    "GEMMA4",
    "MUSE_SPARK",
    "PHI4_MULTIMODAL",
    "QWEN2_5_OMNI",
    "QWEN3_OMNI",
]

Config = dict[str, Any]

GEMMA4: Config = {"vision_config": {}, "audio_config": {}}
"""What its config starts with: by default it has neither."""

GEMMA3N: Config = {
    "vision_config.architecture": "mobilenetv5_base",
    "vision_config.model_args": {"channel_multiplier": 0.125},
    "vision_config.hidden_size": 2048,
    "vision_soft_tokens_per_image": 256,
    "text_config.hidden_size_per_layer_input": 16,
    "text_config.num_kv_shared_layers": 0,
    "audio_config.conf_num_hidden_layers": 2,
    "audio_config.conf_num_attention_heads": 4,
}
PHI4_MULTIMODAL: Config = {
    "vision_config.image_size": 56,
    "vision_config.crop_size": 56,
    "img_projection_dim": 64,
    "audio_config.ext_pw_out_channel": 64,
    "audio_config.depthwise_separable_out_channel": 64,
    "audio_config.nemo_conv_channels": 64,
}
MUSE_SPARK: Config = {
    "audio_config.patch_sizes": [16, 6, 5, 4],
    "audio_config.hidden_sizes": [8, 16, 32, 64],
    "audio_config.num_hidden_layers": 4,
    "audio_config.depths": [1, 1, 1, 1],
    "audio_config.out_hidden_size": 64,
    "out_hidden_size": 256,
    "projector_hidden_size": 64,
}
DOTS3_NOTE: Config = {
    "vision_config.adapter_in_dim": 64,
    "vision_config.adapter_out_dim": 64,
    "audio_config.adapter_input_size": 64,
    "audio_config.adapter_out_dim": 64,
    "audio_config.downsample_hidden_size": 32,
    "audio_config.conv_output_size": LEFT_OUT,  # follows from it
}
QWEN2_5_OMNI: Config = {
    "vision_config.out_hidden_size": 64,
    "vision_config.window_size": 56,
    "vision_config.fullatt_block_indexes": [1],
    "audio_config.n_window": 25,
    "audio_config.output_dim": 64,
    "audio_config.max_source_positions": 200,
}
QWEN3_OMNI: Config = {
    "vision_config.out_hidden_size": 64,
    "vision_config.num_position_embeddings": 64,
    "vision_config.deepstack_visual_indexes": [0],
    "audio_config.n_window": 50,
    "audio_config.n_window_infer": 200,
    "audio_config.output_dim": 64,
    "audio_config.max_source_positions": 200,
    "audio_config.downsample_hidden_size": 32,
}
