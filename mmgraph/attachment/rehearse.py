"""Letting a model call its towers once on an example, to learn with which arguments it does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmgraph.attachment.features import feature_functions
from mmgraph.attachment.wrap import rehearsal
from mmgraph.encoders import TowerEncoder
from mmgraph.errors import CaptureError, UnsupportedModelError
from mmgraph.log import get_logger
from mmgraph.types import Refusal

__all__ = ["rehearse"]

_logger = get_logger(__name__)


def rehearse(model: nn.Module, encoders: Sequence[TowerEncoder]) -> None:
    """Let the model call each tower once on an example, to learn with which arguments."""
    functions = feature_functions(model)
    for encoder in {encoder.name: encoder for encoder in encoders}.values():
        function = functions.get(encoder.tower.modalities[0])
        if function is None:
            continue
        try:
            with rehearsal(_stop_at(encoder)), torch.no_grad():
                function(**_feature_arguments(function, encoder))
        except _Rehearsed:
            continue
        except Exception as error:  # the model wants more than an example: expect plain calls
            _logger.warning(
                "%s is captured for plain calls, since the model can't be rehearsed: %s",
                encoder.name,
                error,
            )


class _Rehearsed(Exception):
    """Leaves the model's feature function once the tower was called."""


def _stop_at(expected: TowerEncoder) -> Any:
    def listener(encoder: TowerEncoder, call: dict[str, Any]) -> None:
        if encoder is expected:
            try:
                encoder.rehearse(call)
            except Refusal as refusal:
                raise CaptureError(f"{encoder.name} can't be captured: {refusal}") from refusal
            raise _Rehearsed

    return listener


def _feature_arguments(function: Any, encoder: TowerEncoder) -> dict[str, Any]:
    """The example of a tower under the names of the feature function's parameters."""
    call = encoder.example_call()
    names = list(inspect.signature(function).parameters)
    main = call.pop(encoder.signature.main_input)
    return {names[0]: main, **{_named(name, names): value for name, value in call.items()}}


def _named(name: str, parameters: Sequence[str]) -> str:
    """The parameter for an argument of the tower: grid_thw is image_grid_thw, for example."""
    for parameter in parameters:
        if parameter.endswith(name):
            return parameter
    raise UnsupportedModelError(f"no parameter of its feature function stands for {name}")
