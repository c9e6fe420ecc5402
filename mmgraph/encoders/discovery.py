"""Finding the towers of a model by what their forward takes, not by a list of models.

A tower is the outermost module whose forward takes pixels or audio features and no text:

* ``forward(hidden_states, grid_thw, ...)`` is a packed tower (Qwen-VL, GLM-V and their kin),
* ``forward(pixel_values | input_features | input_values, ...)`` is a rows tower,
* ``forward(hidden_states, masks)`` is one if its class says that it takes images, videos or audio
  and no text (``input_modalities``): Florence-2, Granite Speech, Phi-4-multimodal's audio,
* a timm model is a rows tower with several entry points.

What resamples a tower's output with layers of attention of its own (a Q-Former, a perceiver) is a
rows tower too. The projectors of most models are one or two products, which no graph makes faster.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

__all__ = ["Tower", "find_towers"]

_TEXT_INPUTS = frozenset({"input_ids", "decoder_input_ids", "inputs_embeds"})
_VISION_INPUTS = frozenset({"pixel_values", "flattened_patches"})
_VIDEO_INPUTS = frozenset({"pixel_values_videos"})
_AUDIO_INPUTS = frozenset({"input_features", "input_values", "audio_mel"})
_LATER_INPUTS = frozenset({"encoder_hidden_states", "position_embeddings", "labels", "targets"})
"""What comes with ``hidden_states`` of an embedding or an encoder: decoders, heads, inner parts."""
_OUTER_INPUTS = frozenset({"labels", "image_embeddings"})
"""What a model around a tower takes: a loss is computed, or the tower's own output is given."""
_MEDIA = frozenset({"image", "video", "audio"})
_RESAMPLERS = {"QFormerModel": "query_embeds", "PerceiverResampler": "context"}
"""How the names of their classes end, and what has one entry for each row of the tower's output."""
_TIMM_METHODS = ("forward", "forward_features")


@dataclass(frozen=True, slots=True, eq=False)
class Tower:
    """An encoder inside a model.

    Attributes:
        name: Path of the module in the model, "" for the model itself.
        module: The encoder.
        layout: "packed" or "rows".
        modalities: Of "image", "video", "audio".
        methods: Methods of the module through which it is called; all take the same first argument.
        main_input: Name of the argument with an entry for each row, if it isn't the first.
    """

    name: str
    module: nn.Module
    layout: Literal["rows", "packed"]
    modalities: tuple[str, ...]
    methods: tuple[str, ...] = ("forward",)
    main_input: str = ""


def find_towers(model: nn.Module) -> list[Tower]:
    """Return the towers of `model`, outermost first; none of them lies inside another."""
    if _is_timm(model):
        return [Tower("", model, "rows", ("image",), _TIMM_METHODS)]
    towers: list[Tower] = []
    for name, module in model.named_modules():
        if any(t.name == "" or name.startswith(f"{t.name}.") for t in towers):
            continue
        tower = _as_tower(name, module, model)
        if tower is not None:
            towers.append(tower)
    return towers + _resamplers(model, towers)


def _as_tower(name: str, module: nn.Module, model: nn.Module) -> Tower | None:
    if not hasattr(module, "config"):  # every PreTrainedModel has one; layers are not looked at
        return None
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    if not _is_encoder_class(module) or _TEXT_INPUTS.intersection(parameters):
        return None
    if "grid_thw" in parameters:
        return Tower(name, module, "packed", _vision_modalities(module, model))
    first = parameters[0] if parameters else ""
    if first in _AUDIO_INPUTS:
        return Tower(name, module, "rows", ("audio",))
    if first in _VISION_INPUTS and not _is_around_a_tower(module, parameters):
        return Tower(name, module, "rows", _vision_modalities(module, model))
    if first in _VIDEO_INPUTS and not _is_around_a_tower(module, parameters):
        return Tower(name, module, "rows", ("video",))
    if first == "hidden_states" and _takes_media_only(module):
        audio = "audio" in _declared_modalities(module)
        modalities = ("audio",) if audio else _vision_modalities(module, model)
        return Tower(name, module, "rows", modalities)
    return None


def _resamplers(model: nn.Module, towers: list[Tower]) -> list[Tower]:
    """What stands behind the towers, and takes what they return."""
    found = []
    for name, module in model.named_modules() if towers else ():
        kind = next((k for k in _RESAMPLERS if type(module).__name__.endswith(k)), None)
        if kind is None or any(t.name == "" or name.startswith(f"{t.name}.") for t in towers):
            continue
        main_input = _RESAMPLERS[kind]
        parameters = inspect.signature(type(module).forward).parameters
        if hasattr(module, "config") and main_input in parameters:
            found.append(Tower(name, module, "rows", towers[0].modalities, main_input=main_input))
    return found


def _takes_media_only(module: nn.Module) -> bool:
    """Whether the class says so, and its forward needs nothing but the main input and masks."""
    declared = _declared_modalities(module)
    others = list(inspect.signature(type(module).forward).parameters.values())[2:]
    needed = [p.name for p in others if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return (
        bool(declared)
        and declared <= _MEDIA
        and _LATER_INPUTS.isdisjoint(p.name for p in others)
        and all("mask" in name for name in needed)
    )


def _declared_modalities(module: nn.Module) -> frozenset[str]:
    declared = getattr(type(module), "input_modalities", ())
    return frozenset((declared,) if isinstance(declared, str) else declared)


def _is_around_a_tower(module: nn.Module, parameters: list[str]) -> bool:
    return not _OUTER_INPUTS.isdisjoint(parameters) and any(
        _as_tower(n, m, module) for n, m in module.named_modules() if n
    )


def _vision_modalities(module: nn.Module, model: nn.Module) -> tuple[str, ...]:
    if _declared_modalities(module) == {"video"}:
        return ("video",)
    return ("image", "video") if hasattr(model, "get_video_features") else ("image",)


def _is_encoder_class(module: Any) -> bool:
    """Whether it is a model of transformers, or a stack of layers in all but that (GroupViT's)."""
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return True
    is_vision = "Vision" in type(module.config).__name__
    return is_vision and any(isinstance(part, nn.ModuleList) for part in module.modules())


def _is_timm(model: nn.Module) -> bool:
    return hasattr(model, "forward_features") and hasattr(model, "pretrained_cfg")
