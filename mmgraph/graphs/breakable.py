"""Breakable captures by backend.

On a GPU each segment is a CUDA graph in the backend's pool, recorded and replayed on its capture
stream; the whole capture is ordered after replays on other streams, whose memory it shares. Its
warm-up runs without the guard, because what breaks do may well read data on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import singledispatch

import torch

from mmgraph.errors import CaptureError, ConfigError
from mmgraph.graphs.backend import GraphBackend, Runnable
from mmgraph.graphs.cuda import CudaBackend, CudaGraph
from mmgraph.graphs.segments import BreakableGraph, SegmentRecorder, recording
from mmgraph.graphs.tape import TapeRecorder
from mmgraph.graphs.trace import TraceBackend

__all__ = ["capture_breakable"]

_WARM_UPS = 2


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


@capture_breakable.register
def _on_cuda(
    backend: CudaBackend, run: Runnable, buffers: Mapping[str, torch.Tensor]
) -> BreakableGraph:
    with torch.no_grad(), backend.ordered(), backend.on_capture_stream():
        try:
            for _ in range(_WARM_UPS):
                run(buffers)
            torch.cuda.synchronize()
        except Exception as error:
            raise CaptureError(f"the warm-up before a capture failed: {error}") from error
        with backend.undone_on_failure():
            return recording(_CudaRecorder(backend), lambda: run(buffers))


class _CudaRecorder(SegmentRecorder):
    """One CUDA graph a segment; what it allocates is counted with the pool, not by segment."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._open = self._backend.begin()

    def end(self) -> CudaGraph:
        assert self._open is not None, "begin() comes first"
        graph, self._open = self._open, None
        graph.capture_end()
        return self._backend.end(graph, [])

    def abandon(self) -> None:
        if self._open is not None:
            graph, self._open = self._open, None
            with suppress(RuntimeError):  # the error that is under way says more
                graph.capture_end()
