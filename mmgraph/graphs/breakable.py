"""Breakable captures by backend; `trace` has them, `cuda` captures whole graphs so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

import torch

from mmgraph.errors import CaptureError, ConfigError
from mmgraph.graphs.backend import GraphBackend, Runnable
from mmgraph.graphs.segments import BreakableGraph, recording
from mmgraph.graphs.tape import TapeRecorder
from mmgraph.graphs.trace import TraceBackend

__all__ = ["capture_breakable"]


@singledispatch
def capture_breakable(
    backend: GraphBackend, run: Runnable, buffers: Mapping[str, torch.Tensor]
) -> BreakableGraph:
    """Capture like ``backend.capture``, in segments around operations marked ``eager_break``.

    Raises:
        CaptureError: A segment or an operation failed; nothing stays open.
        ConfigError: The backend captures whole graphs only.
    """
    raise ConfigError(
        f"the backend {backend.name!r} captures whole graphs only, not in segments: use "
        "CUDAGraphWrapper, or mode NONE where an operation can't be captured"
    )


@capture_breakable.register
def _on_trace(
    backend: TraceBackend, run: Runnable, buffers: Mapping[str, torch.Tensor]
) -> BreakableGraph:
    try:
        with torch.no_grad():
            run(buffers)
            return recording(TapeRecorder(), lambda: run(buffers))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the call can't be recorded: {error}") from error
