"""Breakable captures by backend.

On a GPU each segment is a CUDA graph in the backend's pool, recorded and replayed on its capture
stream; the whole capture is ordered after replays on other streams, whose memory it shares. In the
last warm-up the guard looks at segments only: what breaks do may well read data on the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import singledispatch

import torch

from mmgraph.errors import CaptureError, ConfigError
from mmgraph.graphs.backend import GraphBackend, Runnable
from mmgraph.graphs.cuda import CudaBackend, CudaGraph, abandon
from mmgraph.graphs.guard import CaptureGuard
from mmgraph.graphs.recorders import ModesRecorder
from mmgraph.graphs.segments import BreakableGraph, SegmentRecorder, recording
from mmgraph.graphs.tape import TapeRecorder
from mmgraph.graphs.trace import TraceBackend

__all__ = ["capture_breakable"]

Wrap = Callable[[SegmentRecorder], SegmentRecorder]


@singledispatch
def capture_breakable(
    backend: GraphBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    wrap: Wrap | None = None,
) -> BreakableGraph:
    """Capture like ``backend.capture``, in segments around operations marked ``eager_break``.

    Args:
        backend: Records the segments.
        run: What to capture.
        buffers: What it is captured on.
        wrap: Puts another recorder on top of the backend's.

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
    backend: TraceBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    wrap: Wrap | None = None,
) -> BreakableGraph:
    try:
        with torch.no_grad():
            run(buffers)
            recorder: SegmentRecorder = TapeRecorder(backend.about_to_end)
            recorder = (
                ModesRecorder(recorder, CaptureGuard("cpu")) if wrap is None else wrap(recorder)
            )
            return recording(recorder, lambda: run(buffers))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the call can't be recorded: {error}") from error


@capture_breakable.register
def _on_cuda(
    backend: CudaBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    wrap: Wrap | None = None,
) -> BreakableGraph:
    def capture() -> BreakableGraph:
        return _record_on_cuda(backend, run, buffers, wrap)

    # Who wraps has observed a run: what it reads is folded, and which way it goes is known.
    return backend.either_way(capture) if wrap is None else backend.retried(capture)


def _record_on_cuda(
    backend: CudaBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    wrap: Wrap | None,
) -> BreakableGraph:
    def runs() -> None:
        run(buffers)
        if wrap is None:
            recording(ModesRecorder(None, CaptureGuard()), lambda: run(buffers))
        else:
            run(buffers)

    with torch.no_grad(), backend.ordered(), backend.on_capture_stream():
        backend.warm_up(runs)
        before = backend.reserved_bytes()
        with backend.undone_on_failure():
            recorder: SegmentRecorder = _CudaRecorder(backend)
            recorder = recorder if wrap is None else wrap(recorder)
            graph = recording(recorder, lambda: run(buffers))
        graph.num_bytes = max(0, backend.reserved_bytes() - before)
        return graph


class _CudaRecorder(SegmentRecorder):
    """One CUDA graph a segment; what they allocate is counted for all of them together."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._open = torch.cuda.CUDAGraph()
        self._backend.begin(self._open)

    def end(self) -> CudaGraph:
        assert self._open is not None, "begin() comes first"
        self._backend.about_to_end()
        graph = self._open
        with warnings.catch_warnings():
            # Nothing between two breaks is nothing to warn of.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self._open = None
        return self._backend.end(graph, [])

    def abandon(self) -> None:
        if self._open is not None:
            graph, self._open = self._open, None
            abandon(graph)
