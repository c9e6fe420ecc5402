"""``mmgraph.attach``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mmgraph.attachment.handle import Handle
from mmgraph.attachment.wrap import AttachedMethod
from mmgraph.config import GraphConfig
from mmgraph.encoders import Tower, find_towers
from mmgraph.errors import ConfigError, UnsupportedModelError
from mmgraph.log import get_logger

__all__ = ["attach"]

_logger = get_logger(__name__)


def attach(model: Any, config: GraphConfig | None = None) -> Handle:
    """Let the encoders of `model` run from captured graphs.

    Args:
        model: A model of transformers (a VLM, an audio model or a pure encoder), a timm model, or
            a transformers pipeline around one.
        config: Settings; the defaults capture each size when it is first seen.

    Returns:
        The handle, which is also a context manager: leaving it detaches.

    Raises:
        UnsupportedModelError: The model holds no encoder that mmgraph knows how to call.
        ConfigError: It is attached already, or the settings don't fit it.
        CaptureError: With ``capture="upfront"``: an encoder can't be captured at all.
    """
    config = GraphConfig() if config is None else config
    if not isinstance(config, GraphConfig):
        raise ConfigError(f"config must be a GraphConfig, got {type(config).__name__}")
    module = _module_of(model)
    towers = find_towers(module)
    if not towers:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds no encoder: mmgraph looks for models of transformers "
            "whose forward takes pixel_values, input_features or (hidden_states, grid_thw) and no "
            "text, and for models of timm (of FeatureGetterNet and the like attach what they "
            "wrap). EncoderCudaGraphManager serves an encoder of your own"
        )
    _refuse_attached(towers)
    handle = Handle(module, towers, config)
    if config.capture == "upfront":
        if config.mode == "piecewise":
            _logger.warning(
                "mode 'piecewise' has nothing to capture up front, its graphs are of exact calls: "
                "make some in a block of handle.capturing(), or set capture='lazy'"
            )
        try:
            handle.capture()
        except BaseException:
            handle.detach()
            raise
    return handle


def _module_of(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(
            f"attach() takes a torch module or a pipeline around one, got {type(model).__name__}"
        )
    return module


def _refuse_attached(towers: Sequence[Tower]) -> None:
    for tower in towers:
        if any(isinstance(tower.module.__dict__.get(m), AttachedMethod) for m in tower.methods):
            raise ConfigError(
                f"{tower.name or 'the model'} is attached already: call detach() on the first "
                "handle before attaching again"
            )
