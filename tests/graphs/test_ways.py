"""The way that models go in a capture: that of eager mode, unless they read on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph.graphs.guard import HostAccess
from mmgraph.graphs.ways import Way, as_if_capturing


@pytest.fixture(autouse=True)
def nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.cuda, torch.cuda.graphs):  # there may be no driver to ask
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)


class Reader:
    """Reads on the host on some ways."""

    def __init__(self, *ways: bool, error: Exception | None = None) -> None:
        self.ways = ways
        self.error = error or HostAccess("it reads")
        self.told: list[bool] = []

    def __call__(self) -> None:
        self.told.append(torch.cuda.is_current_stream_capturing())
        if self.told[-1] in self.ways:
            raise self.error


def goes(way: Way) -> bool:
    with way.taken():
        return torch.cuda.is_current_stream_capturing()


def test_it_is_the_way_of_eager_mode_if_that_reads_nothing() -> None:
    way, runs = Way(), Reader(True)
    way.find(runs)
    assert runs.told == [False]
    assert not goes(way)


def test_it_is_the_way_of_a_capture_from_the_first_read_on() -> None:
    way, runs = Way(), Reader(False)
    way.find(runs)
    assert runs.told == [False, True]
    assert goes(way)
    way.find(runs)
    assert runs.told == [False, True, True]


def test_what_reads_on_both_ways_changes_nothing() -> None:
    way, runs = Way(), Reader(False, True)
    for _ in range(2):
        with pytest.raises(HostAccess):
            way.find(runs)
    assert runs.told == [False, True] * 2
    assert not goes(way)


@pytest.mark.parametrize("error", [ValueError("a bug"), torch.OutOfMemoryError("no memory")])
def test_another_error_is_no_reason_for_another_way(error: Exception) -> None:
    way, runs = Way(), Reader(False, error=error)
    with pytest.raises(type(error)):
        way.find(runs)
    assert runs.told == [False]
    assert not goes(way)


def test_models_are_told_whether_a_stream_captures_and_the_compiler_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked_by(name: str) -> Any:
        scope: dict[str, Any] = {"__name__": name, "torch": torch}
        exec("answer = torch.cuda.is_current_stream_capturing()", scope)
        return scope["answer"]

    models = ("transformers.utils.import_utils", "model")
    others = ("torch._dynamo.convert_frame", "mmgraph.ops", "triton.runtime")
    for answer in (True, False):
        for module in (torch.cuda, torch.cuda.graphs):
            monkeypatch.setattr(module, "is_current_stream_capturing", lambda: not answer)  # noqa: B023
        with as_if_capturing(answer):
            assert {asked_by(name) for name in models} == {answer}
            assert {asked_by(name) for name in others} == {not answer}
            with as_if_capturing(not answer):
                assert {asked_by(name) for name in models} == {not answer}
            assert {asked_by(name) for name in models} == {answer}
        assert {asked_by(name) for name in models + others} == {not answer}
