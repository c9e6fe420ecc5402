"""Graphs of one exact call: everything about it is given but the contents of its buffers.

What can't be captured otherwise can be like this: sizes that the forward reads on the host and
tables that it uploads are folded (see ``folding.py``), and a submodule that reads what is in the
buffers becomes a break. Nobody has to say which: the observed run finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import GraphBackend, Runnable
from mmgraph.graphs.breakable import capture_breakable
from mmgraph.graphs.folding import Folding
from mmgraph.graphs.operations import ReadsContents
from mmgraph.graphs.regions import Regions
from mmgraph.graphs.segments import BreakableGraph, breaks_at, recording
from mmgraph.graphs.ways import as_if_capturing

__all__ = ["capture_exact", "capture_folded"]

_MAX_BREAKS = 64


def capture_exact(
    backend: GraphBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    constants: Iterable[torch.Tensor],
) -> BreakableGraph:
    """Capture `run`, which may read `constants` but not `buffers` on the host.

    Submodules that read what came of the buffers are captured around.

    Args:
        backend: Records the segments.
        run: What to capture.
        buffers: What it is captured on.
        constants: Tensors that `run` uses besides and that always hold the same.

    Raises:
        CaptureError: It can't be captured; nothing stays open.
        ConfigError: The backend captures whole graphs only.
    """
    return _captured(backend, run, buffers, list(constants), _MAX_BREAKS)


def capture_folded(
    backend: GraphBackend, run: Runnable, buffers: Mapping[str, torch.Tensor]
) -> BreakableGraph:
    """Capture `run` as one graph, where all that it does on the host is the same in each call.

    Tables that it makes of nothing but numbers and uploads, for example.

    Raises:
        CaptureError: It can't be captured, or what it reads on the host came of `buffers`.
        ConfigError: The backend captures whole graphs only.
    """
    return _captured(backend, run, buffers, [], max_breaks=0)


def _captured(
    backend: GraphBackend,
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    constants: list[torch.Tensor],
    max_breaks: int,
) -> BreakableGraph:
    breaks: list[nn.Module] = []
    capturing = False  # the way of a capture reads less on the host
    # Throughout: two captures of one module would mix up their breaks; and code that is compiled
    # in the mode of the warm-ups has to do for the recording.
    with backend.ordered(), torch.inference_mode(False), torch.no_grad():
        while True:
            folding = Folding(constants)
            regions = Regions(folding)
            with breaks_at(breaks), as_if_capturing(capturing), regions.open():
                try:
                    _observe(run, buffers, folding, regions, warm=bool(breaks))
                except ReadsContents as error:
                    if capturing:
                        breaks.append(_next_break(error, breaks, max_breaks))
                    capturing = True
                    continue
                graph = _record(backend, _following(regions, run), buffers, folding)
                graph.num_fast = regions.num_fast
                return graph


def _following(regions: Regions, run: Runnable) -> Runnable:
    """`run`, each time from the first region on."""

    def begun(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        regions.follow()
        return run(buffers)

    return begun


def _next_break(error: ReadsContents, breaks: list[nn.Module], max_breaks: int) -> nn.Module:
    """The submodule that reads contents; raises `error` if a break there is no help."""
    if error.module is None or error.module in breaks or len(breaks) >= max_breaks:
        raise error
    return error.module


def _observe(
    run: Runnable,
    buffers: Mapping[str, torch.Tensor],
    folding: Folding,
    regions: Regions,
    *,
    warm: bool,
) -> None:
    try:
        if not warm:  # tables that modules make once and keep are no part of the call
            run(buffers)
        regions.observe()
        recording(folding.observer(), lambda: run(buffers))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the call can't be observed: {error}") from error


def _record(
    backend: GraphBackend, run: Runnable, buffers: Mapping[str, torch.Tensor], folding: Folding
) -> BreakableGraph:
    graph = capture_breakable(backend, folding.keeping_outputs(run), buffers, folding.recorder)
    try:
        folding.end()
        graph.keep(folding.used.values())
    except BaseException:
        graph.close()
        raise
    return graph
