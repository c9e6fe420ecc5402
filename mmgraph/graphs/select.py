"""Choosing the backend for a device."""

from __future__ import annotations

import torch

from mmgraph.errors import ConfigError
from mmgraph.graphs.backend import GraphBackend
from mmgraph.graphs.cuda import CudaBackend
from mmgraph.graphs.trace import TraceBackend

__all__ = ["select_backend"]


def select_backend(name: str, device: torch.device) -> GraphBackend:
    """Return the backend called `name` ("auto", "cuda" or "trace") for `device`.

    Raises:
        ConfigError: The backend can't work on the device.
    """
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "trace"
    if name == "trace":
        return TraceBackend()
    if name != "cuda":
        raise ConfigError(f"backend must be one of auto, cuda, trace, got {name!r}")
    if device.type != "cuda":
        raise ConfigError(
            f"backend='cuda' needs an encoder on a CUDA device, got one on {device}: move the "
            "model, or use backend='trace'"
        )
    return CudaBackend(device)
