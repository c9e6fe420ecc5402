"""A model of transformers as the engine's idea of a multimodal model: items in, embeddings out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mmgraph.encoders import Tower, eager_towers
from mmgraph.errors import ConfigError

__all__ = ["FeatureModel", "feature_functions"]

_MODALITIES = ("image", "video", "audio")


def feature_functions(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """``get_image_features`` and its siblings by modality, from the model or its base model."""
    base = getattr(model, "base_model", model)
    found = {m: getattr(base, f"get_{m}_features", None) for m in _MODALITIES}
    found = {m: f or getattr(model, f"get_{m}_features", None) for m, f in found.items()}
    return {modality: function for modality, function in found.items() if function is not None}


class FeatureModel:
    """Encodes items through the model's own feature functions.

    Args:
        model: A model of transformers, or a pure encoder.
        tower: What is called if it has no feature functions.
        eager: Leave the graphs out.
    """

    def __init__(self, model: nn.Module, tower: Tower, *, eager: bool) -> None:
        self._functions = feature_functions(model) or dict.fromkeys(tower.modalities, tower.module)
        self._main_inputs = {m: _first_parameter(f) for m, f in self._functions.items()}
        self._eager = eager

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        """Return one tensor (tokens, D) an item.

        Raises:
            ConfigError: No feature function takes these arguments.
        """
        function = self._functions[self._modality_of(mm_kwargs)]
        if not self._eager:
            return _by_item(function(**mm_kwargs))
        with eager_towers():
            return _by_item(function(**mm_kwargs))

    def _modality_of(self, mm_kwargs: Mapping[str, Any]) -> str:
        for modality, name in self._main_inputs.items():
            if name in mm_kwargs:
                return modality
        raise ConfigError(
            f"no encoder takes {sorted(mm_kwargs)}: an item needs one of "
            f"{sorted(set(self._main_inputs.values()))}"
        )


def _first_parameter(function: Callable[..., Any]) -> str:
    target = function.forward if isinstance(function, nn.Module) else function
    if isinstance(function, nn.Module):
        return list(inspect.signature(type(function).forward).parameters)[1]
    return next(iter(inspect.signature(target).parameters))


def _by_item(output: Any) -> list[torch.Tensor]:
    features = getattr(output, "pooler_output", None)
    if features is None or (isinstance(features, torch.Tensor) and features.dim() < 3):
        features = getattr(output, "last_hidden_state", features)
    if features is None:
        features = output
    return [f if f.dim() > 1 else f.unsqueeze(0) for f in features]
