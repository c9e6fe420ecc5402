"""Configs of transformers made tiny: the defaults of a class, with every known size cut down.

A released size is a few numbers with a few names, whatever the architecture: widths, layers, heads,
experts, entries of a vocabulary. Those names stand in `SIZES`; what is left, an entry overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LEFT_OUT", "shrunk"]

LEFT_OUT = "(left out)"
"""As the value of an override: leave the field to the default of its class."""

_WIDTH, _INNER, _HEADS, _HEAD, _LAYERS, _VOCABULARY = 64, 128, 4, 16, 2, 1000
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width", "vt_hidden_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "ffn_dim", "vt_intermediate_size"), _INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), _INNER),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp"), _INNER),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "vt_num_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim"), _HEAD),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_layers", "n_layers", "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("vt_num_hidden_layers", "num_blocks"), _LAYERS),
    **dict.fromkeys(("num_spatial_layers", "num_temporal_layers"), 1),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
}
_COUNTS_OF_LAYERS = frozenset(name for name, size in SIZES.items() if size == _LAYERS)
_BACKBONE = frozenset({"out_features", "out_indices", "_out_features", "_out_indices"})
_DERIVED = _BACKBONE | {"stage_names", "transformers_version", "_name_or_path"}
_AS_THEY_ARE = frozenset({"model_args", "rope_scaling", "rope_parameters"})
_SPREADS = frozenset({"initializer_range", "init_std"})
_SPREAD = 0.125
"""With the usual 0.02 attention and positions hardly reach the output of so narrow a model, and a
test would not feel them go wrong."""


def shrunk(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, a config as a dict, made tiny; `overrides` go by dotted paths."""
    small = _small(config)
    for path, value in overrides.items():
        *parents, name = path.split(".")
        place = small
        for parent in parents:
            place = place.setdefault(parent, {})
        if value == LEFT_OUT:
            place.pop(name, None)
        else:
            place[name] = value
    return small


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    counts = {n for name, n in config.items() if name in _COUNTS_OF_LAYERS and isinstance(n, int)}
    return {
        name: _smaller(str(name), value, counts - set(range(_LAYERS + 1)))
        for name, value in config.items()
        if name not in _DERIVED
    }


def _smaller(name: str, value: Any, counts: set[int]) -> Any:
    if name in _AS_THEY_ARE or isinstance(value, bool):
        return value
    if name == "per_layer_config" and isinstance(value, Mapping):
        return {layer: part for layer, part in value.items() if int(layer) < _LAYERS}
    if isinstance(value, Mapping):
        return _small(value)
    if isinstance(value, list) and len(value) in counts:  # one entry a layer
        return value[:_LAYERS]
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index")):
            return min(value, _VOCABULARY - 1)
        return min(value, SIZES.get(name, value))
    return _SPREAD if name in _SPREADS and isinstance(value, float) else value
