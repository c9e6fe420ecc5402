"""A whole model: its towers, or why modules that take pixels or audio are none."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmgraph.encoders import find_towers
from mmgraph.inspect.trial import Trial
from mmgraph.inspect.view import TowerView, view_tower

__all__ = ["Candidate", "Inspection", "inspect_model"]

_TEXT = ("input_ids", "decoder_input_ids", "inputs_embeds")
_MEDIA = ("pixel", "image", "video", "audio", "input_features", "input_values", "mel", "patches")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that takes pixels or audio and is no tower.

    Attributes:
        name: Its path, "" for the model itself.
        class_name: Its class.
        takes: The arguments that look like pixels or audio.
        why_not: Why it wasn't taken.
    """

    name: str
    class_name: str
    takes: tuple[str, ...]
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What mmgraph makes of a model.

    Attributes:
        model: What was inspected, as the user named it.
        kind: What that was taken for.
        class_name: Class of the model.
        parameters: Numbers in all its weights.
        towers: Those found, outermost first.
        candidates: Where none was found: modules that take pixels or audio.
        trials: What running the towers gave, if that was asked for.
    """

    model: str
    kind: str
    class_name: str
    parameters: int
    towers: tuple[TowerView, ...]
    candidates: tuple[Candidate, ...] = ()
    trials: tuple[Trial, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-ready data."""
        return dataclasses.asdict(self)


def inspect_model(model: nn.Module, name: str = "", kind: str = "a model") -> Inspection:
    """Look at `model`, with weights or on the meta device; it is left as it is."""
    towers = tuple(view_tower(tower, model) for tower in find_towers(model))
    return Inspection(
        model=name or type(model).__name__,
        kind=kind,
        class_name=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        towers=towers,
        candidates=() if towers else tuple(_candidates(model)),
    )


def _candidates(model: nn.Module) -> list[Candidate]:
    """Modules whose forward takes pixels or audio; layers that come many times once."""
    found: dict[tuple[type, str], Candidate] = {}
    for name, module in model.named_modules():
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        takes = tuple(p for p in parameters if _is_media(p))
        if takes:
            why_not = _why_not(module, parameters)
            candidate = Candidate(name, type(module).__name__, takes, why_not)
            found.setdefault((type(module), why_not), candidate)
    return list(found.values())


def _is_media(parameter: str) -> bool:
    return any(parameter.startswith(word) for word in _MEDIA) and not parameter.endswith("_ids")


def _why_not(module: nn.Module, parameters: list[str]) -> str:
    text = [p for p in parameters if p in _TEXT]
    if text:
        return f"it takes text as well ({text[0]})"
    if not hasattr(module, "config"):
        return "it has no config, so it is taken for a layer"
    if not any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return "it is no PreTrainedModel of transformers"
    return f"its first argument is {parameters[0]}, which mmgraph doesn't know"
