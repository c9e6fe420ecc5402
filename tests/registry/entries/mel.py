"""Audio as mel frames: windows of one length, clips with a mask, and clips in chunks."""

from __future__ import annotations

from typing import Any, Literal

import torch

from tests.registry.entries.shared import (
    DOTS3_NOTE,
    GEMMA3N,
    GEMMA4,
    PHI4_MULTIMODAL,
    QWEN2_5_OMNI,
    QWEN3_OMNI,
)
from tests.registry.entry import Entry, Inputs
from tests.registry.inputs.audio import chunks, clips, windows

__all__ = ["ENTRIES"]

_FRAMES: Literal["bins, frames"] = "bins, frames"
_BINS: Literal["frames, bins"] = "frames, bins"
_MASK = "input_features_mask"
_SHORT = {"audio_config.max_source_positions": 64}
_GRANITE = {
    "encoder_config.hidden_dim": 64,
    "encoder_config.dim_head": 16,
    "encoder_config.num_heads": 4,
    "projector_config.encoder_hidden_size": 64,
}
_ASR = {
    "audio_config.n_window": 50,
    "audio_config.n_window_infer": 200,
    "audio_config.output_dim": 64,
    "audio_config.downsample_hidden_size": 32,
}
_SEAMLESS = {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4}
_CLAP = {
    "depths": [1, 1],
    "num_attention_heads": [2, 4],
    "patch_embeds_hidden_size": 16,
    "hidden_size": 32,
    "enable_fusion": False,
}


def _mel(model: str, inputs: Inputs, **fields: Any) -> Entry:
    name = fields.pop("name", model)
    return Entry(name=name, model=model, modality="audio", inputs=inputs, **fields)


def _alone(model: str, inputs: Inputs, **fields: Any) -> Entry:
    """Called by itself, not by a model around it."""
    return _mel(model, inputs, through="tower", **fields)


def _masked(
    order: Literal["bins, frames", "frames, bins"], bins: int, mask: str = "attention_mask"
) -> Inputs:
    return clips((128, 96), order, bins=bins, mask=mask)


_WINDOWS = [
    _alone("whisper", windows(80, 128), config={"max_source_positions": 64}),
    _alone("qwen2_audio_encoder", windows(128, 128), config={"max_source_positions": 64}),
    _mel("voxtral", windows(128, 128), config={**_SHORT, "audio_config.intermediate_size": 256}),
    _mel(
        "voxtral_realtime",
        windows(128, 128),
        eager="it may be called with embeddings and keeps a cache between chunks of a stream",
    ),
    _mel("granite_speech", windows(200, 160), config=_GRANITE),
    _mel("granite_speech_plus", windows(200, 160), config=_GRANITE),
    _alone("clap_audio_model", windows(1, 250, 64), config=_CLAP, model_class="ClapAudioModel"),
    _alone(
        "audio-spectrogram-transformer",
        windows(128, 128, name="input_values"),
        config={"max_length": 128},
    ),
]
_CLIPS = [
    _mel("audioflamingo3", _masked(_FRAMES, 128, _MASK), config=_SHORT),
    _alone("musicflamingo", _masked(_FRAMES, 128, _MASK), config=_SHORT),
    _mel(
        "glmasr",
        _masked(_FRAMES, 128, _MASK),
        config={**_SHORT, "audio_config.intermediate_size": 256},
    ),
    _mel(
        "fun_asr_nano", _masked(_BINS, 560, _MASK), config={"adaptor_config.intermediate_size": 16}
    ),
    _mel(
        "gemma4",
        clips((96, 64), _BINS, bins=128, mask=_MASK, dtype=torch.bool),
        name="gemma4/audio",
        start=GEMMA4,
        tower="audio_tower",
    ),
    _mel(
        "gemma3n",
        clips((128, 96), _BINS, bins=128, mask=_MASK, dtype=torch.bool),
        name="gemma3n/audio",
        config=GEMMA3N,
        tower="audio_tower",
    ),
    _alone(
        "phi4_multimodal",
        clips((200, 120), _BINS, bins=80, name="hidden_states", mask="mask", dtype=torch.bool),
        name="phi4_multimodal/audio",
        config=PHI4_MULTIMODAL,
        tower="embed_tokens_extend.audio_embed.encoder",
    ),
    _alone("parakeet_encoder", _masked(_BINS, 80), config={"subsampling_conv_channels": 16}),
    _alone("lasr_encoder", _masked(_BINS, 128), config={"subsampling_conv_channels": 16}),
    _alone("canary", _masked(_BINS, 128)),
    _alone("cohere_asr", _masked(_BINS, 128)),
    _alone("nemotron_asr_streaming_encoder", _masked(_BINS, 80)),
    _alone("granite_speech5_encoder", _masked(_BINS, 320)),
    _alone("wav2vec2-bert", _masked(_BINS, 160)),
    _alone("speech_to_text", _masked(_BINS, 80), config={"conv_channels": 32}),
    _alone(
        "seamless_m4t_v2",
        _masked(_BINS, 160),
        config=_SEAMLESS,
        tower="speech_encoder",
        model_class="SeamlessM4Tv2ForSpeechToText",
    ),
]


def _chunked(mask: str) -> Inputs:
    return clips((400, 270), _FRAMES, bins=128, mask=mask, kind="mel in chunks, mask")


_CHUNKS = [
    _mel(
        "qwen2_5_omni_thinker",
        _chunked("feature_attention_mask"),
        name="qwen2_5_omni/audio",
        config=QWEN2_5_OMNI,
        model_class="Qwen2_5OmniThinkerForConditionalGeneration",
        tower="audio_tower",
    ),
    _mel(
        "qwen3_omni_moe_thinker",
        _chunked("feature_attention_mask"),
        name="qwen3_omni_moe/audio",
        config=QWEN3_OMNI,
        model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
        tower="audio_tower",
    ),
    _mel("qwen3_asr", _chunked(_MASK), config=_ASR),
    _mel(
        "dots3_note",
        chunks(128, 128, (20480, 12800)),
        name="dots3_note/audio",
        config=DOTS3_NOTE,
        tower="audio_tower",
        since="5.24",
    ),
]
ENTRIES = [*_WINDOWS, *_CLIPS, *_CHUNKS]
