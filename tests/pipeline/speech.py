"""Models that listen."""

from __future__ import annotations

from typing import Any

from tests.pipeline.architectures import Architecture
from tests.pipeline.media import pixels, sound, valid
from tests.pipeline.tiny import AUDIO

POSITIONS: dict[str, Any] = {"audio_config.max_source_positions": 64}
_WIDE = {**POSITIONS, "audio_config.intermediate_size": 256}
_SPEAKS: dict[str, Any] = {"max_source_positions": 64, "max_target_positions": 64}
TWO, SHORTER = (2, 128, 128), valid(128, 128, 80)

SPEECH = (
    Architecture(
        type="qwen2_audio",
        model="Qwen2AudioForConditionalGeneration",
        changes=POSITIONS,
        media={"clips": sound(*TWO, tokens=(32, 20), more={"feature_attention_mask": SHORTER})},
        seed=6,
        quick=("clips",),
    ),
    Architecture(
        type="audioflamingo3",
        model="AudioFlamingo3ForConditionalGeneration",
        changes=POSITIONS,
        media={"clips": sound(*TWO, tokens=(32, 20), more={"input_features_mask": SHORTER})},
        seed=8,
        quick=("clips",),
    ),
    Architecture(
        type="voxtral",
        model="VoxtralForConditionalGeneration",
        changes={**_WIDE, "audio_token_id": AUDIO},
        media={"clips": sound(*TWO, tokens=(16, 16))},
        seed=3,
        quick=("clips",),
    ),
    Architecture(
        type="glmasr",
        model="GlmAsrForConditionalGeneration",
        changes=_WIDE,
        media={"clips": sound(*TWO, tokens=(16, 10), more={"input_features_mask": SHORTER})},
    ),
    Architecture(
        type="granite_speech",
        model="GraniteSpeechForConditionalGeneration",
        changes={
            "encoder_config.hidden_dim": 64,
            "encoder_config.dim_head": 16,
            "projector_config.encoder_hidden_size": 64,
        },
        media={"clips": sound(1, 200, 160, tokens=(42,))},
        exact=("clips",),  # its Q-Former asks one set of queries about all windows
    ),
    Architecture(
        type="qwen3_asr",
        model="Qwen3ASRForConditionalGeneration",
        changes={
            "audio_config.n_window": 50,
            "audio_config.n_window_infer": 200,
            "audio_config.output_dim": 64,
            "audio_config.downsample_hidden_size": 32,
        },
        media={
            "clips": sound(
                *(2, 128, 400),
                tokens=(52, 35),
                more={"input_features_mask": valid(400, 400, 270)},
            )
        },
        exact=("clips",),
        seed=7,
        quick=("clips",),
    ),
    Architecture(
        type="whisper",
        model="WhisperForConditionalGeneration",
        changes=_SPEAKS,
        media={"clips": sound(2, 80, 128)},
        asked=None,
        seed=2,
        quick=("clips",),
    ),
    Architecture(
        type="speech_to_text",
        model="Speech2TextForConditionalGeneration",
        changes=_SPEAKS,
        media={"clips": sound(2, 128, 80)},
        asked=None,
        seed=4,
    ),
    Architecture(
        type="moonshine",
        model="MoonshineForConditionalGeneration",
        media={"clips": pixels(2, 4000, name="input_values")},
        asked=None,
    ),
)
