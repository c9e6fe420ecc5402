"""Models with towers for several senses, and towers that read sizes on the host."""

from __future__ import annotations

import torch

from tests.pipeline.architectures import Architecture
from tests.pipeline.fixed import SIDE
from tests.pipeline.media import (
    Draw,
    Groups,
    Tensors,
    frames,
    patches,
    pixels,
    places,
    sound,
    valid,
    video,
)
from tests.pipeline.packed import WINDOWS
from tests.pipeline.speech import POSITIONS, SHORTER, TWO
from tests.pipeline.tiny import AUDIO, IMAGE, OTHER, START

_PIXTRAL = pixels(
    *(2, 3, 112, 84),
    tokens=(12, 6),
    more={"image_sizes": torch.tensor([[112, 84], [56, 84]])},
)


def _numbered_patches(draw: Draw) -> tuple[Tensors, Groups]:
    """Patches of one image, each behind its row and its column, from 1."""
    where = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 7))
    return {"flattened_patches": torch.cat([where, draw(24, 768)], dim=1)[None]}, []


UNUSUAL = (
    Architecture(
        type="mistral3",
        model="Mistral3ForConditionalGeneration",
        changes={"vision_config.image_size": 112, "vision_config.patch_size": 14},
        media={"images": _PIXTRAL},
        exact=("images",),
        quick=("images",),
    ),
    Architecture(
        type="lighton_ocr",
        model="LightOnOcrForConditionalGeneration",
        changes={"vision_config.image_size": 112},
        media={"images": _PIXTRAL},
        exact=("images",),
        seed=2,
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
                *(2, 64, 768),
                tokens=(6, 4),
                more={
                    "spatial_shapes": torch.tensor([[4, 6], [8, 2]]),
                    "pixel_attention_mask": valid(64, 24, 16),
                },
            )
        },
        exact=("images",),
        quick=("images",),
    ),
    Architecture(
        type="pix2struct",
        model="Pix2StructForConditionalGeneration",
        changes={
            "vision_config.d_kv": 16,
            "vision_config.d_ff": 128,
            "vision_config.seq_len": 64,
            "text_config.d_kv": 16,
            "text_config.d_ff": 128,
        },
        media={"images": _numbered_patches},
        # Numbers of rows and columns stand among the pixels: made up ones are out of bounds.
        eager=("images",),
        asked=None,
        quick=("images",),
    ),
    Architecture(
        type="gemma3n",
        model="Gemma3nForConditionalGeneration",
        changes={
            "vision_config.architecture": "test_resnet",
            "vision_config.hidden_size": 96,
            "vision_config.vocab_offset": 100,
            "vision_config.vocab_size": 12,
            "vision_soft_tokens_per_image": 4,
            "audio_config.conf_num_hidden_layers": 2,
            "audio_config.conf_num_attention_heads": 4,
            "audio_config.vocab_offset": 112,
            "audio_config.vocab_size": 16,
            "audio_soft_tokens_per_image": 16,
            "text_config.hidden_size_per_layer_input": 16,
            "text_config.vocab_size_per_layer_input": 128,
            "text_config.intermediate_size": [128, 128],
            "text_config.activation_sparsity_pattern": [0.0, 0.0],
            "text_config.num_kv_shared_layers": 0,
        },
        media={
            "images": pixels(1, 3, 64, 64, tokens=(4,)),
            "clips": sound(
                *(2, 128, 128),
                tokens=(16, 16),
                more={"input_features_mask": valid(128, 128, 96).bool()},
            ),
        },
        seed=12,
    ),
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
                *(2, 72, 192),
                tokens=(4, 2),
                more={"image_position_ids": places(72, (6, 6), (3, 6))},
            ),
            "video": video(
                *(2, 72, 192),
                tokens=(4, 4),
                more={
                    "video_position_ids": places(72, (6, 6), (6, 6)),
                    "num_frames_per_video": torch.tensor([2]),
                },
            ),
            "clips": sound(
                *(2, 96, 128),
                tokens=(24, 16),
                more={"input_features_mask": valid(96, 96, 64).bool()},
            ),
        },
        exact=("images", "video"),
        since={"video": (5, 20)},  # before, frames had a dimension of their own
        types="mm_token_type_ids",
        quick=("images",),
    ),
    Architecture(
        type="phi4_multimodal",
        model="Phi4MultimodalForCausalLM",
        changes={
            **SIDE,
            "vision_config.crop_size": 56,
            "vision_config.image_token_id": IMAGE,
            "audio_config.ext_pw_out_channel": 64,
            "audio_config.depthwise_separable_out_channel": 64,
            "audio_config.nemo_conv_channels": 64,
            "audio_config.audio_token_id": AUDIO,
        },
        media={
            "images": pixels(  # a whole and two crops side by side
                *(1, 3, 3, 56, 56),
                tokens=(2 * 5 + 1 + 2 * 3,),
                name="image_pixel_values",
                more={
                    "image_sizes": torch.tensor([[56, 112]]),
                    "image_attention_mask": torch.ones(1, 3, 4, 4, dtype=torch.long),
                },
            ),
            "clips": pixels(
                *(2, 200, 80),
                tokens=(25, 15),
                name="audio_input_features",
                token=AUDIO,
                more={
                    "audio_embed_sizes": torch.tensor([25, 15]),
                    "audio_attention_mask": valid(200, 200, 120).bool(),
                },
            ),
        },
        exact=("images", "clips"),
        seed=1,
        quick=("clips",),
    ),
    Architecture(
        type="qwen2_5_omni_thinker",
        model="Qwen2_5OmniThinkerForConditionalGeneration",
        changes={
            **WINDOWS,
            **POSITIONS,
            "vision_start_token_id": START,
            "audio_start_token_id": OTHER,
            "audio_config.n_window": 25,
            "audio_config.output_dim": 64,
        },
        media={
            "images": patches((1176,)),
            "video": frames((1176,), more={"video_second_per_grid": torch.tensor([1.0])}),
            "clips": sound(*TWO, tokens=(32, 20), more={"feature_attention_mask": SHORTER}),
        },
        exact=("clips",),
        quick=("clips",),
    ),
)
