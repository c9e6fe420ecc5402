"""The way that models go in a capture: that of eager mode, unless it can't be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.utils.import_utils import is_cuda_stream_capturing

from mmgraph import CaptureError
from mmgraph.graphs.guard import BrokenCapture, HostAccess
from mmgraph.graphs.ways import Ways, as_if_capturing


@pytest.fixture(autouse=True)
def nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.cuda, torch.cuda.graphs):  # there may be no driver to ask
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)


class Capture:
    """Fails on some ways."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = {"eager": errors.get("eager"), "captured": errors.get("captured")}
        self.told: list[bool] = []

    def __call__(self) -> str:
        self.told.append(is_cuda_stream_capturing())
        error = self.errors["captured" if self.told[-1] else "eager"]
        if error is not None:
            raise error
        return "graph"


def test_it_is_the_way_of_eager_mode_if_that_can_be_captured() -> None:
    capture = Capture(captured=HostAccess("it reads"))
    assert Ways().take(capture) == "graph"
    assert capture.told == [False]


def test_it_is_the_other_way_where_that_reads() -> None:
    """The first one is tried each time: another call may read nothing."""
    capture, ways = Capture(eager=HostAccess("it reads")), Ways()
    for _ in range(2):
        assert ways.take(capture) == "graph"
    assert capture.told == [False, True] * 2


def test_after_a_capture_that_cuda_broke_off_the_other_way_is_the_first() -> None:
    """Each of them costs a memory pool."""
    capture, ways = Capture(eager=BrokenCapture("CUDA refuses it")), Ways()
    for _ in range(2):
        assert ways.take(capture) == "graph"
    assert capture.told == [False, True, True]
    only_eager = Capture(captured=HostAccess("it reads"))
    assert ways.take(only_eager) == "graph"
    assert only_eager.told == [True, False]


@pytest.mark.parametrize("second", [BrokenCapture("refused"), CaptureError("no such layer")])
def test_where_neither_can_be_captured_the_error_is_that_of_the_first(
    second: CaptureError,
) -> None:
    capture = Capture(eager=HostAccess("it reads"), captured=second)
    with pytest.raises(HostAccess, match="it reads") as caught:
        Ways().take(capture)
    assert caught.value.__cause__ is second
    assert capture.told == [False, True]


def no_memory() -> CaptureError:
    error = CaptureError("the capture failed")
    error.__cause__ = torch.OutOfMemoryError("no memory")
    return error


@pytest.mark.parametrize("error", [no_memory(), ValueError("a bug")])
def test_another_error_is_no_reason_for_another_way(error: Exception) -> None:
    capture = Capture(eager=error)
    with pytest.raises(type(error)):
        Ways().take(capture)
    assert capture.told == [False]
    capture = Capture(eager=HostAccess("it reads"), captured=error)
    with pytest.raises(type(error), match=str(error)):
        Ways().take(capture)


def test_models_are_told_whether_a_stream_captures_and_others_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked_by(name: str) -> Any:
        scope: dict[str, Any] = {"__name__": name, "torch": torch}
        exec("answer = torch.cuda.is_current_stream_capturing()", scope)
        return scope["answer"]

    models = ("transformers.utils.import_utils", "transformers_modules.some.modeling")
    others = ("torch._dynamo.convert_frame", "mmgraph.ops", "vllm.distributed", "__main__")
    for answer in (True, False):
        for module in (torch.cuda, torch.cuda.graphs):
            monkeypatch.setattr(module, "is_current_stream_capturing", lambda told=not answer: told)
        with as_if_capturing(answer):
            assert {asked_by(name) for name in models} == {answer}
            assert {asked_by(name) for name in others} == {not answer}
            with as_if_capturing(not answer):
                assert {asked_by(name) for name in models} == {not answer}
            assert {asked_by(name) for name in models} == {answer}
        assert {asked_by(name) for name in models + others} == {not answer}
