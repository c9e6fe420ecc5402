"""Any model of transformers, made tiny: its default config with small numbers in it.

Weights are drawn so that everything matters. With the libraries' own initialisation attention and
images hardly reach the output of so narrow a model, gates are shut, and ids would be the same
whatever an encoder returned.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
PAD, BOS, EOS = 0, 1, 2
WORDS = (5, 6, 7)
IMAGE, VIDEO, AUDIO, START, END, OTHER = 120, 121, 122, 123, 124, 125
SPECIAL = (IMAGE, VIDEO, AUDIO, START, END, OTHER)

_SMALL = {
    **dict.fromkeys(("depth", "num_layers", "n_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("vt_num_hidden_layers", "num_blocks", "num_decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width", "vt_hidden_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "vt_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), 128),
    **dict.fromkeys(("vt_intermediate_size", "ffn_dim", "moe_intermediate_size"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size",), 128),
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
}
_SET = {
    "head_dim": 16,
    "attention_head_dim": 16,
    "tie_word_embeddings": False,  # or a model repeats its last word
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO),
    **dict.fromkeys(("vision_start_token_id", "boi_token_id", "image_start_token_id"), START),
    **dict.fromkeys(("vision_end_token_id", "eoi_token_id", "image_end_token_id"), END),
    **{"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS},
    "decoder_start_token_id": BOS,
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
_STALE = ("transformers_version", "_name_or_path", "out_features", "out_indices", "stage_names")


def tiny_config(model_type: str, changes: Mapping[str, Any], **defaults: Any) -> Any:
    """Return the config of `model_type` with at most two layers of width 64.

    Args:
        model_type: As transformers spells it.
        changes: By dotted path, what else to set; ``None`` stands for itself.
        defaults: Arguments of the config's class, where its defaults lack a part.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    data = _shrunk(kind(**defaults).to_dict())
    for path, value in changes.items():
        *parents, name = path.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        part[name] = value
    return kind.from_dict(data)


def rope(*sections: int) -> dict[str, Any]:
    """Changes for rotary positions of three axes in heads of 16, with halves of `sections`."""
    kind = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"text_config.rope_parameters": kind}


def tiny_model(class_name: str, config: Any, seed: int = 0) -> Any:
    """Return a model in float32 and in eval mode, every weight of which is drawn anew."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, class_name)._from_config(config, dtype=torch.float32).eval()
    draw_weights(model, seed)
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw matrices that keep the size of what they are given, and make all else uneven.

    What a parameter is hangs on its name and shape alone, not on what else a release has.
    """
    convolutions = [m.weight for m in model.modules() if isinstance(m, _CONVOLUTIONS)]
    fans = {id(weight): weight[0].numel() for weight in convolutions}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            fan = fans.get(id(parameter), parameter.shape[-1])
            parameter.copy_(drawn * fan**-0.5)
        elif parameter.numel() == 1:
            parameter.add_(0.5)  # a gate; many are made shut
        else:
            parameter.nan_to_num_().add_(0.1 * drawn)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _shrunk(data: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for name, value in data.items():
        if name in _STALE:
            continue
        if isinstance(value, dict) and not name.startswith("rope") and name != "model_args":
            value = _shrunk(value)
        elif name in _PER_LAYER and value is not None:
            value = value[:2]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = min(value, _SMALL.get(name, value))
        given = value is not None or name in ("pad_token_id", "bos_token_id")
        small[name] = _SET.get(name, value) if given else value
    return small
