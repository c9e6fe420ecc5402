"""What offloaders hook into: `before_capture_ends`, on the stream that is being captured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.cuda.graphs import is_current_stream_capturing

from mmgraph import CaptureError, eager_break
from mmgraph.graphs import CapturedGraph, GraphBackend
from tests.graphs.injection import CALLS, KINDS, Buffers, Steps, assert_follows

SEGMENTS = {"full": 1, "pieces": 2, "exact": 2}


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.ones(4, 8, device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_called_in_order_at_the_end_of_each_recording_only(
    backend: GraphBackend, device: str, x: torch.Tensor, kind: str
) -> None:
    steps, seen = Steps(), list[tuple[str, int, int, bool]]()

    def hook(name: str) -> None:
        capturing = device == "cuda" and is_current_stream_capturing()
        seen.append((name, steps.calls, steps.place, capturing))

    backend.before_capture_ends += [partial(hook, "first"), partial(hook, "second")]
    graph = KINDS[kind](backend, steps, {"x": x})
    recorded, capturing = len(CALLS[device, kind]), device == "cuda"
    places = [6] if kind == "full" else [3, 6]
    assert len(places) == SEGMENTS[kind]
    assert seen == [
        (name, recorded, place, capturing) for place in places for name in ("first", "second")
    ]
    assert_follows(graph, x)
    assert len(seen) == 2 * len(places)  # a replay calls none


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_computes_is_part_of_the_recording(
    backend: GraphBackend, x: torch.Tensor, kind: str
) -> None:
    copy = torch.zeros_like(x)
    backend.before_capture_ends.append(lambda: copy.copy_(x))
    graph = KINDS[kind](backend, Steps(), {"x": x})
    x.fill_(5)
    graph.replay()
    assert (copy == 5).all()


def test_each_backend_has_hooks_of_its_own(backend: GraphBackend) -> None:
    other = type(backend)() if backend.name == "trace" else type(backend)(torch.device("cuda"))
    backend.before_capture_ends.append(lambda: None)
    assert other.before_capture_ends == []


class Offloaded:
    """Forks a stream for work that nobody here waits for, as an offloader does.

    Attributes:
        copies: The stream.
    """

    def __init__(self) -> None:
        self.copies = torch.cuda.Stream()
        self.next = torch.zeros(4, 8, device="cuda")

    def __call__(self, buffers: Buffers) -> list[torch.Tensor]:
        y = buffers["x"] * 2
        self._prefetch()
        y = self._in_a_break(y)
        self._prefetch()
        return [y + 1]

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.copies)

    def _prefetch(self) -> None:
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.next.add_(1)

    @property
    def _in_a_break(self) -> Any:
        return eager_break(lambda y: y * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_copy_stream_needs_the_hook(kind: str) -> None:
    from mmgraph.graphs.cuda import CudaBackend

    backend, run = CudaBackend(torch.device("cuda")), Offloaded()
    x = torch.ones(4, 8, device="cuda")

    def capture() -> CapturedGraph:
        return KINDS[kind](backend, run, {"x": x})

    with pytest.raises(CaptureError, match="the capture failed"):
        capture()
    assert not torch.cuda.is_current_stream_capturing()
    backend.before_capture_ends.append(run.join)
    graph = capture()
    torch.cuda.synchronize()
    before = run.next.clone()
    x.fill_(4)
    (output,) = graph.replay()
    torch.cuda.synchronize()
    assert (output == 4 * 2 * 3 + 1).all()
    assert (run.next == before + 2).all()  # the copies are in the graph
