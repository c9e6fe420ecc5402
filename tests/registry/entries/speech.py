"""Audio as samples, mostly with convolutions in front as in wav2vec 2.0."""

from __future__ import annotations

from typing import Any

from tests.registry.entries.shared import MUSE_SPARK
from tests.registry.entry import Entry, Inputs
from tests.registry.inputs.audio import clips, windows
from tests.registry.shrink import LEFT_OUT

__all__ = ["ENTRIES"]

_SAMPLES = "input_values"
_CONVOLUTIONS = {
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def _speech(model: str, inputs: Inputs, **fields: Any) -> Entry:
    fields = {"name": model, "through": "tower", **fields}
    return Entry(model=model, modality="audio", inputs=inputs, **fields)


def _masked(*lengths: int) -> Inputs:
    kind = "samples, mask"
    return clips(lengths, "samples", name=_SAMPLES, mask="attention_mask", kind=kind)


def _wav2vec2(model: str, *, eager: str = "", **config: Any) -> Entry:
    return _speech(model, _masked(4000, 3000), config={**_CONVOLUTIONS, **config}, eager=eager)


ENTRIES = [
    _wav2vec2("wav2vec2"),
    _wav2vec2(
        "wav2vec2-conformer",
        eager="each eager call assigns a buffer to itself, which is taken for a change",
    ),
    _wav2vec2("hubert"),
    _wav2vec2("wavlm"),
    _wav2vec2("data2vec-audio", num_conv_pos_embeddings=2),
    _wav2vec2("unispeech"),
    _wav2vec2("unispeech-sat"),
    _wav2vec2("sew", conv_dim=[32] * 13, squeeze_factor=2),
    _speech(
        "moonshine",
        _masked(4000, 3000),
        config={
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
        },
    ),
    _speech("moonshine_streaming", _masked(4000, 3200), config={"num_key_value_heads": 4}),
    _speech(
        "pe_audio_encoder",
        windows(1, 4096, name=_SAMPLES, kind="samples"),
        config={
            "dac_config.encoder_hidden_size": 8,
            "dac_config.downsampling_ratios": [8, 8, 8],
            "dac_config.hidden_size": LEFT_OUT,  # these three follow from the two above
            "dac_config.hop_length": LEFT_OUT,
            "dac_config.upsampling_ratios": LEFT_OUT,
        },
    ),
    _speech(
        "omniasr",
        windows(1, 4000, name=_SAMPLES, kind="samples"),
        config={"audio_config.conv_dim": [32] * 7},
        through="features",
        since="5.24",
    ),
    _speech(
        "muse_spark",
        windows(3840, name=_SAMPLES, kind="samples"),
        name="muse_spark/audio",
        config=MUSE_SPARK,
        through="features",
        tower="audio_tower",
        since="5.24",
    ),
]
