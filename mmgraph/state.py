"""`EncoderState`: builds manager and runner behind three gates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

from mmgraph.config import GraphConfig
from mmgraph.errors import UnsupportedModelError
from mmgraph.graphs import GraphBackend
from mmgraph.log import get_logger
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.protocol import (
    SupportsEncoderCudaGraph,
    SupportsMultiModal,
    supports_encoder_cudagraph,
)
from mmgraph.runner import EncoderRunner
from mmgraph.types import Reason

__all__ = ["EncoderState", "Gate"]

_logger = get_logger(__name__)


class Gate(Enum):
    """What must be open for an encoder to run from graphs, and how to open it."""

    ENFORCE_EAGER = "enforce_eager is set: use GraphConfig(enforce_eager=False)"
    CONFIG_FLAG = "cudagraph_mm_encoder is off: use GraphConfig(cudagraph_mm_encoder=True)"
    MODEL = "the model doesn't implement SupportsEncoderCudaGraph: implement its seven methods"

    @property
    def reason(self) -> Reason:
        """The reason under which items are counted while this gate is closed."""
        return {
            Gate.ENFORCE_EAGER: Reason.ENFORCE_EAGER,
            Gate.CONFIG_FLAG: Reason.DISABLED,
            Gate.MODEL: Reason.UNSUPPORTED_MODEL,
        }[self]


@dataclass(frozen=True, slots=True)
class EncoderState:
    """An encoder ready to run.

    Attributes:
        runner: Runs it, from graphs where it can.
        manager: Holds the graphs, or ``None`` while a gate is closed.
        closed: The first gate that is closed, or ``None``.
    """

    runner: EncoderRunner
    manager: EncoderCudaGraphManager | None
    closed: Gate | None

    @classmethod
    def build(
        cls,
        model: Any,
        config: GraphConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        backend: GraphBackend | None = None,
        timing: bool = False,
    ) -> EncoderState:
        """Build the state of `model`; a closed gate is logged with how to open it.

        Raises:
            UnsupportedModelError: `model` can't even encode in eager mode.
            ConfigError: See :class:`EncoderCudaGraphManager`.
        """
        if not isinstance(model, SupportsMultiModal):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no embed_multimodal(**mm_kwargs), so it can't encode "
                "multimodal inputs: implement it, or use mmgraph.attach()"
            )
        closed = closed_gate(config, model)
        manager = None
        if closed is None:
            encoder = cast(SupportsEncoderCudaGraph, model)  # the third gate says so
            manager = EncoderCudaGraphManager(config, device, dtype, encoder, backend=backend)
        else:
            _logger.info("the encoder runs in eager mode: %s", closed.value)
        return cls(EncoderRunner(model, manager, device=device, timing=timing), manager, closed)


def closed_gate(config: GraphConfig, model: object) -> Gate | None:
    """Return the first gate that keeps `model` from graphs, or ``None`` if all are open."""
    if config.enforce_eager:
        return Gate.ENFORCE_EAGER
    if not config.cudagraph_mm_encoder:
        return Gate.CONFIG_FLAG
    return None if supports_encoder_cudagraph(model) else Gate.MODEL
