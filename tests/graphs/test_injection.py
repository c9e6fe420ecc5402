"""A failure at any step of any kind of capture leaves the process as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import mmgraph.graphs.cuda
import mmgraph.graphs.exact
import mmgraph.graphs.folding_modes
import mmgraph.graphs.segments
import mmgraph.graphs.tape
import mmgraph.graphs.trace
from mmgraph import CaptureError
from mmgraph.graphs import BreakableGraph, GraphBackend, select_backend
from mmgraph.graphs.folding import Folding
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from tests.graphs.injection import (
    CALLS,
    KINDS,
    OPERATIONS,
    Injected,
    Steps,
    assert_fails,
    assert_follows,
    fail_at_call,
    state,
)

ERRORS = {Injected: CaptureError, KeyboardInterrupt: KeyboardInterrupt, SystemExit: SystemExit}
"""What is raised, and what the caller of a capture gets."""


def case(device: str, *values: Any) -> Any:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return pytest.param(device, *values, marks=marks, id="-".join(map(str, (device, *values))))


@contextmanager
def as_before(device: str, backend: GraphBackend, kind: str) -> Iterator[torch.Tensor]:
    """Check around a failing capture; gives the buffer."""
    x, capture = torch.ones(4, 8, device=device), KINDS[kind]
    older = capture(backend, Steps(), {"x": x})
    capture(backend, Steps(), {"x": x}).close()  # what a first capture leaves for good is there
    before = state(device)
    yield x
    assert state(device) == before
    assert not backend.busy()
    assert_follows(older, x)
    torch.testing.assert_close(Steps()({"x": x})[0], Steps().expected(x))  # eager mode
    newer = capture(backend, Steps(), {"x": x})
    for graph in (newer, older, newer):
        assert_follows(graph, x)
    for graph in (newer, older):
        graph.close()
    assert torch.rand(2, device=device).numel() == 2


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("device", "kind", "call"),
    [case(device, kind, call) for (device, kind), calls in CALLS.items() for call in calls],
)
def test_a_call_that_fails_at_any_operation(
    device: str, kind: str, call: str, error: type[BaseException]
) -> None:
    number = CALLS[device, kind].index(call) + 1
    for place in range(OPERATIONS):
        backend = select_backend("auto", torch.device(device))
        with as_before(device, backend, kind) as x:
            steps = Steps()
            steps.fails_at, steps.error = (number, place), error
            assert_fails(partial(KINDS[kind], backend, steps, {"x": x}), ERRORS[error])
            assert (steps.calls, steps.place) == (number, place)


def test_the_calls_of_a_runnable_are_those_that_are_listed() -> None:
    for kind, capture in KINDS.items():
        steps = Steps()
        capture(select_backend("auto", torch.device("cpu")), steps, {"x": torch.ones(4, 8)})
        assert (steps.calls, steps.place) == (len(CALLS["cpu", kind]), OPERATIONS)


@pytest.mark.gpu
def test_the_calls_of_a_runnable_on_a_gpu_are_those_that_are_listed() -> None:
    for kind, capture in KINDS.items():
        steps = Steps()
        x = torch.ones(4, 8, device="cuda")
        capture(select_backend("auto", torch.device("cuda")), steps, {"x": x})
        assert (steps.calls, steps.place) == (len(CALLS["cuda", kind]), OPERATIONS)


TAPE = mmgraph.graphs.tape.TapeRecorder
SEGMENTED = ["pieces", "exact"]
STEPS = [
    # device, kinds, owner, function, number of the call, whether it had done its work
    ("cpu", ["full"], mmgraph.graphs.trace, "make_fx", 1, False),
    ("cpu", ["full"], mmgraph.graphs.trace, "make_fx", 1, True),
    ("cpu", SEGMENTED, TAPE, "begin", 1, False),
    ("cpu", SEGMENTED, TAPE, "begin", 2, True),
    ("cpu", SEGMENTED, TAPE, "end", 1, False),
    ("cpu", SEGMENTED, TAPE, "end", 2, True),
    ("cpu", SEGMENTED, mmgraph.graphs.tape.Tape, "replay", 1, False),
    ("cpu", SEGMENTED, mmgraph.graphs.tape, "_Operation", 3, False),
    ("cuda", list(KINDS), torch.cuda.CUDAGraph, "capture_begin", 1, False),
    ("cuda", list(KINDS), torch.cuda.CUDAGraph, "capture_begin", 1, True),
    ("cuda", list(KINDS), torch.cuda.CUDAGraph, "capture_end", 1, False),
    ("cuda", list(KINDS), torch.cuda.CUDAGraph, "capture_end", 1, True),
    ("cuda", list(KINDS), mmgraph.graphs.cuda, "CudaGraph", 1, False),
    ("cuda", SEGMENTED, torch.cuda.CUDAGraph, "capture_begin", 2, False),
    ("cuda", SEGMENTED, torch.cuda.CUDAGraph, "capture_begin", 2, True),
    ("cuda", SEGMENTED, torch.cuda.CUDAGraph, "capture_end", 2, False),
    ("cuda", SEGMENTED, torch.cuda.CUDAGraph, "capture_end", 2, True),
    ("cuda", SEGMENTED, torch.cuda.CUDAGraph, "replay", 1, False),
    ("cuda", ["full"], mmgraph.graphs.cuda, "weak_view", 1, False),
    ("cuda", ["pieces"], mmgraph.graphs.segments, "_EagerCall", 2, False),  # the first is guarded
    ("cuda", ["pieces"], mmgraph.graphs.segments, "_EagerCall", 2, True),
    *(
        (device, SEGMENTED, mmgraph.graphs.segments, function, 1, after)
        for device in ("cpu", "cuda")
        for function, after in (("weak_view", False), ("_EagerCall", False), ("_EagerCall", True))
    ),
    *(
        (device, ["exact"], owner, function, nth, after)
        for device in ("cpu", "cuda")
        for owner, function, nth, after in (
            (Folding, "observer", 1, False),
            (Folding, "recorder", 1, True),
            (Folding, "next_step", 1, False),
            (Folding, "next_step", 4, False),
            (mmgraph.graphs.folding_modes, "Step", 2, False),
            (mmgraph.graphs.recorders.ModesRecorder, "begin", 2, True),
            (mmgraph.graphs.recorders.ModesRecorder, "end", 1, False),
            (mmgraph.graphs.recorders.ModesRecorder, "begin", 4, True),
            (mmgraph.graphs.recorders.ModesRecorder, "end", 3, False),
        )
    ),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("device", "kind", "name", "nth", "after", "owner"),
    [
        pytest.param(
            device,
            kind,
            name,
            nth,
            after,
            owner,
            id=f"{device}-{kind}-{name}-{nth}-{'after' if after else 'before'}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for device, kinds, owner, name, nth, after in STEPS
        for kind in kinds
    ],
)
def test_a_step_around_the_calls_that_fails(
    device: str,
    kind: str,
    name: str,
    nth: int,
    after: bool,
    owner: Any,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = select_backend("auto", torch.device(device))
    with as_before(device, backend, kind) as x:
        with monkeypatch.context() as patched:
            calls = fail_at_call(patched, owner, name, error, nth=nth, after=after)
            assert_fails(partial(KINDS[kind], backend, Steps(), {"x": x}), ERRORS[error])
        assert calls[0] >= nth


@pytest.mark.parametrize("error", [CaptureError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), [(Folding, "end"), (BreakableGraph, "keep")])
@pytest.mark.parametrize("device", [case("cpu"), case("cuda")])
def test_an_exact_capture_that_fails_after_its_recording_frees_it(
    device: str,
    owner: Any,
    name: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = select_backend("auto", torch.device(device))
    with as_before(device, backend, "exact") as x:
        with monkeypatch.context() as patched:
            closed = fail_at_call(patched, BreakableGraph, "close", error, nth=-1)
            fail_at_call(patched, owner, name, error)
            assert_fails(partial(KINDS["exact"], backend, Steps(), {"x": x}), error)
        assert closed == [1]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("device", "kind"), [case(device, kind) for device in ("cpu", "cuda") for kind in KINDS]
)
def test_a_hook_before_the_end_that_fails(
    device: str, kind: str, error: type[BaseException]
) -> None:
    backend = select_backend("auto", torch.device(device))

    def fail() -> None:
        raise error("injected")

    with as_before(device, backend, kind) as x:
        backend.before_capture_ends.append(fail)
        assert_fails(partial(KINDS[kind], backend, Steps(), {"x": x}), ERRORS[error])
        backend.before_capture_ends.clear()


@pytest.mark.parametrize(
    ("device", "kind"), [case(device, kind) for device in ("cpu", "cuda") for kind in KINDS]
)
def test_the_collector_stays_as_its_user_had_it(device: str, kind: str) -> None:
    backend = select_backend("auto", torch.device(device))
    x = torch.ones(4, 8, device=device)
    gc.disable()
    gc.freeze()
    try:
        for place in (0, OPERATIONS - 1):
            steps = Steps()
            steps.fails_at = (len(CALLS[device, kind]), place)
            assert_fails(partial(KINDS[kind], backend, steps, {"x": x}), CaptureError)
        assert not gc.isenabled()
        assert frozen_by_somebody()
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_failures_in_a_row_leave_streams_and_memory(kind: str) -> None:
    backend = select_backend("cuda", torch.device("cuda"))
    x = torch.ones(1 << 20, device="cuda")

    def fail_everywhere() -> None:
        for call in range(1, len(CALLS["cuda", kind]) + 1):
            for place in range(OPERATIONS):
                steps = Steps()
                steps.fails_at = (call, place)
                assert_fails(partial(KINDS[kind], backend, steps, {"x": x}), CaptureError)

    fail_everywhere()
    before = state("cuda")
    streams = {s.cuda_stream for s in mmgraph.graphs.cuda._capture_streams._free[x.device]}
    fail_everywhere()
    assert state("cuda") == before
    after = {s.cuda_stream for s in mmgraph.graphs.cuda._capture_streams._free[x.device]}
    assert after == streams
