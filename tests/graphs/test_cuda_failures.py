"""A capture that fails leaves no trace, wherever it fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmgraph import CaptureError
from mmgraph.graphs.cuda import CudaBackend
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from tests.graphs.cuda_cases import Buffers, affine, assert_follows

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda"))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 64, device="cuda")


class Fails:
    """A callable that goes wrong from its call number `first` on."""

    def __init__(self, first: int, wrong: Callable[[torch.Tensor], Any]) -> None:
        self.calls = 0
        self.first = first
        self.wrong = wrong

    def __call__(self, buffers: Buffers) -> list[torch.Tensor]:
        self.calls += 1
        x = affine(5)(buffers)[0]
        if self.calls >= self.first:
            self.wrong(x)
        return [x]


def raise_value_error(_: torch.Tensor) -> None:
    raise ValueError("no such layer\nsecond line")


def raise_interrupt(_: torch.Tensor) -> None:
    raise KeyboardInterrupt


def draw_and_raise(x: torch.Tensor) -> None:
    torch.rand_like(x)
    raise ValueError("no such layer")


def draw_and_read(x: torch.Tensor) -> None:
    torch.nn.functional.dropout(x).sum().item()


def nest_a_stream(x: torch.Tensor) -> None:
    """Fork into a stream that never joins."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x * 2


FAILURES = [
    # while warming up
    pytest.param(1, raise_value_error, CaptureError, "no such layer", id="first call"),
    # under the guard
    pytest.param(2, raise_value_error, CaptureError, "no such layer", id="second call"),
    pytest.param(2, torch.Tensor.tolist, CaptureError, "host", id="seen by the guard"),
    # inside the capture
    pytest.param(
        3,
        raise_value_error,
        CaptureError,
        "^the capture failed: ValueError: no such layer$",
        id="third call",
    ),
    # where no guard is: the capture is invalidated by CUDA
    pytest.param(3, torch.Tensor.tolist, CaptureError, "the capture failed", id="read, unseen"),
    pytest.param(3, lambda x: x.sum().item(), CaptureError, "the capture failed", id="item"),
    pytest.param(
        3, lambda x: torch.cuda.synchronize(), CaptureError, "the capture failed", id="synchronize"
    ),
    pytest.param(3, nest_a_stream, CaptureError, "the capture failed", id="stream left unjoined"),
    # with the generator in use
    pytest.param(3, draw_and_raise, CaptureError, "no such layer", id="random, then an error"),
    pytest.param(3, draw_and_read, CaptureError, "the capture failed", id="random, then a read"),
    # not an Exception: passed on as it is
    pytest.param(1, raise_interrupt, KeyboardInterrupt, "^$", id="interrupt in warm-up"),
    pytest.param(3, raise_interrupt, KeyboardInterrupt, "^$", id="interrupt in the capture"),
]


@pytest.mark.parametrize(("first", "wrong", "error", "message"), FAILURES)
def test_a_failed_capture_leaves_no_trace(
    backend: CudaBackend,
    x: torch.Tensor,
    first: int,
    wrong: Callable[[torch.Tensor], Any],
    error: type[BaseException],
    message: str,
) -> None:
    older = backend.capture(affine(2), {"x": x})
    torch.cuda.manual_seed(7)
    expected = [torch.rand(5, device="cuda") for _ in range(2)]
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(5, device="cuda"), expected[0])
    collector = gc.isenabled(), frozen_by_somebody()
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()

    with pytest.raises(error, match=message):
        backend.capture(Fails(first, wrong), {"x": x})

    assert not torch.cuda.is_current_stream_capturing()
    assert not backend.busy()
    assert (torch.cuda.current_stream(), torch.cuda.current_device()) == (stream, device)
    assert (gc.isenabled(), frozen_by_somebody()) == collector
    assert torch.equal(torch.rand(5, device="cuda"), expected[1])
    torch.cuda.synchronize()
    assert_follows(older, x, 2)
    newer = backend.capture(affine(3), {"x": x})
    for graph, factor in ((newer, 3), (older, 2), (newer, 3)):
        assert_follows(graph, x, factor)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(5, device="cuda"), expected[0])


def test_failures_in_a_row_leave_no_trace(backend: CudaBackend, x: torch.Tensor) -> None:
    older = backend.capture(affine(2), {"x": x})
    for first in (3, 1, 3, 2, 3):
        with pytest.raises(CaptureError):
            backend.capture(Fails(first, lambda t: t.sum().item()), {"x": x})
        with pytest.raises(CaptureError):
            backend.capture(Fails(first, raise_value_error), {"x": x})
    newer = backend.capture(affine(3), {"x": x})
    assert_follows(newer, x, 3)
    assert_follows(older, x, 2)
    torch.randn(3, device="cuda")


def test_memory_of_a_failed_capture_comes_back(backend: CudaBackend) -> None:
    x = torch.randn(1 << 24, device="cuda")

    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def fail() -> None:
        with pytest.raises(CaptureError):
            backend.capture(Fails(3, raise_value_error), {"x": x})

    fail()
    before = used()
    for _ in range(4):
        fail()
    assert used() <= before + x.numel() * x.element_size() // 2


class Counted:
    """Counts its calls, and those of them under the guard; may go wrong beyond some rows."""

    def __init__(self, wrong: Callable[[torch.Tensor], Any] | None = None, rows: int = 0) -> None:
        self.calls = self.guarded = 0
        self.wrong = wrong
        self.rows = rows

    def __call__(self, buffers: Buffers) -> list[torch.Tensor]:
        self.calls += 1
        self.guarded += _get_current_dispatch_mode() is not None
        x = affine(5)(buffers)[0]
        if self.wrong is not None and x.shape[0] > self.rows:
            self.wrong(x)
        return [x]


def test_captures_that_are_alike_are_guarded_once(backend: CudaBackend, x: torch.Tensor) -> None:
    run = Counted()
    graphs = [backend.capture(run, {"x": x}, "a")]  # a pool goes with the last graph in it
    assert (run.calls, run.guarded) == (3, 1)
    graphs.append(backend.capture(run, {"x": x[:32]}, "a"))
    assert (run.calls, run.guarded) == (5, 1)
    assert_follows(graphs[0], x, 5)
    assert_follows(graphs[1], x[:32], 5)
    # Nothing is like None, not even None.
    graphs += [backend.capture(run, {"x": x}, like) for like in ("b", None, None)]
    assert run.guarded == 4


def test_a_capture_that_only_seemed_alike_is_guarded_after_all(
    backend: CudaBackend, x: torch.Tensor
) -> None:
    run = Counted(torch.Tensor.tolist, rows=32)
    first = backend.capture(run, {"x": x[:16]}, "a")
    with pytest.raises(CaptureError, match="host"):
        backend.capture(run, {"x": x}, "a")
    assert run.guarded >= 2
    assert_follows(first, x[:16], 5)
    assert_follows(backend.capture(run, {"x": x[:32]}, "a"), x[:32], 5)
