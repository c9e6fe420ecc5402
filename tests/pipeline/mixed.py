"""Models with towers for several senses, and those whose towers are of another make."""

from __future__ import annotations

import torch

from tests.pipeline.architectures import Architecture
from tests.pipeline.media import frames, patches, pixels, sound
from tests.pipeline.tiny import AUDIO, IMAGE, VIDEO


def _mask(length, *valid):
    return (torch.arange(length) < torch.tensor(valid)[:, None]).long()


def _positions(length, *sizes):
    """Of patches (x, y), an image each; the rest is padding."""
    rows = torch.full((len(sizes), length, 2), -1)
    for row, (h, w) in zip(rows, sizes, strict=True):
        row[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    return rows


def _numbered_patches(draw):
    """Patches of one image, each behind its row and its column, from 1."""
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 7))
    return {"flattened_patches": torch.cat([places, draw(24, 768)], dim=1)[None]}, []


MIXED = (
    Architecture(
        type="gemma4",
        model="Gemma4ForConditionalGeneration",
        defaults={"vision_config": {}, "audio_config": {}},
        changes={
            "vision_config.patch_size": 8,
            "vision_config.position_embedding_size": 64,
            "text_config.per_layer_config": {},
            "text_config.vocab_size_per_layer_input": 128,
            "text_config.hidden_size_per_layer_input": 16,
        },
        media={
            "images": pixels(
                (2, 72, 192), (4, 2), more={"image_position_ids": _positions(72, (6, 6), (3, 6))}
            ),
            "video": pixels(
                (2, 72, 192),
                (4, 4),
                name="pixel_values_videos",
                token=VIDEO,
                more={
                    "video_position_ids": _positions(72, (6, 6), (6, 6)),
                    "num_frames_per_video": torch.tensor([2]),
                },
            ),
            "clips": sound(
                (2, 96, 128), (24, 16), more={"input_features_mask": _mask(96, 96, 64).bool()}
            ),
        },
        types="mm_token_type_ids",
    ),
    Architecture(
        type="phi4_multimodal",
        model="Phi4MultimodalForCausalLM",
        changes={
            "vision_config.image_size": 56,
            "vision_config.crop_size": 56,
            "vision_config.image_token_id": IMAGE,
            "audio_config.ext_pw_out_channel": 64,
            "audio_config.depthwise_separable_out_channel": 64,
            "audio_config.nemo_conv_channels": 64,
            "audio_config.audio_token_id": AUDIO,
        },
        media={
            "images": pixels(
                (1, 3, 3, 56, 56),
                (2 * 5 + 1 + 6 - 4 + 2 + 2,),
                name="image_pixel_values",
                more={
                    "image_sizes": torch.tensor([[56, 112]]),
                    "image_attention_mask": torch.ones(1, 3, 4, 4, dtype=torch.long),
                },
            ),
            "clips": pixels(
                (2, 200, 80),
                (25, 15),
                name="audio_input_features",
                token=AUDIO,
                more={
                    "audio_embed_sizes": torch.tensor([25, 15]),
                    "audio_attention_mask": _mask(200, 200, 120).bool(),
                },
            ),
        },
    ),
    Architecture(
        type="qwen2_5_omni_thinker",
        model="Qwen2_5OmniThinkerForConditionalGeneration",
        changes={
            "vision_start_token_id": 123,
            "audio_start_token_id": 125,
            "vision_config.out_hidden_size": 64,
            "vision_config.window_size": 56,
            "vision_config.fullatt_block_indexes": [1],
            "audio_config.max_source_positions": 64,
            "audio_config.n_window": 25,
            "audio_config.output_dim": 64,
            "text_config.rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        media={
            "images": patches((1176,)),
            "video": frames((1176,), more={"video_second_per_grid": torch.tensor([1.0])}),
            "clips": sound(
                (2, 128, 128), (32, 20), more={"feature_attention_mask": _mask(128, 128, 80)}
            ),
        },
    ),
    Architecture(
        type="lfm2_vl",
        model="Lfm2VlForConditionalGeneration",
        changes={
            "vision_config.num_patches": 64,
            "text_config.layer_types": ["full_attention", "conv"],
            "projector_hidden_size": 64,
        },
        media={
            "images": pixels(
                (2, 64, 768),
                (6, 4),
                more={
                    "spatial_shapes": torch.tensor([[4, 6], [8, 2]]),
                    "pixel_attention_mask": _mask(64, 24, 16),
                },
            )
        },
    ),
    Architecture(
        type="perception_lm",
        model="PerceptionLMForConditionalGeneration",
        defaults={
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_tiny_patch16_384",
                "do_pooling": False,
                "model_args": {
                    "img_size": [64, 64],
                    "depth": 2,
                    "global_pool": "",
                    "embed_dim": 192,
                },
            }
        },
        changes={"projector_pooling_ratio": 2},
        media={
            "images": pixels((1, 2, 3, 64, 64), (8,)),
            "video": pixels((1, 3, 3, 64, 64), (12,), name="pixel_values_videos", token=VIDEO),
        },
    ),
    Architecture(
        type="llama4",
        model="Llama4ForConditionalGeneration",
        changes={
            "vision_config.image_size": 56,
            "vision_config.projector_input_dim": 64,
            "vision_config.projector_output_dim": 64,
            "vision_config.vision_output_dim": 64,
            "vision_config.intermediate_size": 256,
            "text_config.no_rope_layers": [1, 0],
            "text_config.moe_layers": [0],
            "text_config.layer_types": ["chunked_attention", "full_attention"],
            "text_config.intermediate_size_mlp": 128,
        },
        media={"images": pixels((2, 3, 56, 56), (4, 4))},
    ),
    Architecture(
        type="pix2struct",
        model="Pix2StructForConditionalGeneration",
        changes={
            "vision_config.d_kv": 16,
            "vision_config.d_ff": 128,
            "text_config.d_kv": 16,
            "text_config.d_ff": 128,
            "vision_config.patch_embed_hidden_size": 768,
            "vision_config.seq_len": 64,
        },
        media={"images": _numbered_patches},
        tokens=None,
    ),
    Architecture(
        type="granite_speech",
        model="GraniteSpeechForConditionalGeneration",
        changes={
            "encoder_config.hidden_dim": 64,
            "encoder_config.dim_head": 16,
            "projector_config.encoder_hidden_size": 64,
        },
        media={"clips": sound((1, 200, 160), (42,))},
    ),
    Architecture(
        type="voxtral",
        model="VoxtralForConditionalGeneration",
        changes={
            "audio_config.max_source_positions": 64,
            "audio_config.intermediate_size": 256,
            "audio_token_id": 122,
        },
        media={"clips": sound((2, 128, 128), (16, 16))},
    ),
    Architecture(
        type="gemma3n",
        model="Gemma3nForConditionalGeneration",
        changes={
            "vision_config.architecture": "test_resnet",
            "vision_config.hidden_size": 96,
            "vision_config.vocab_offset": 100,
            "vision_config.vocab_size": 12,
            "audio_config.vocab_offset": 112,
            "audio_config.vocab_size": 16,
            "vision_soft_tokens_per_image": 4,
            "text_config.hidden_size_per_layer_input": 16,
            "text_config.vocab_size_per_layer_input": 128,
            "text_config.intermediate_size": [128, 128],
            "text_config.activation_sparsity_pattern": [0.0, 0.0],
            "text_config.num_kv_shared_layers": 0,
            "audio_config.conf_num_hidden_layers": 2,
            "audio_config.conf_num_attention_heads": 4,
            "audio_soft_tokens_per_image": 16,
        },
        media={
            "images": pixels((1, 3, 64, 64), (4,)),
            "clips": sound(
                (2, 128, 128), (16, 16), more={"input_features_mask": _mask(128, 128, 96).bool()}
            ),
        },
        slow=True,
    ),
)
