"""The soak test itself, for some seconds; minutes of it are run by command."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from scripts import soak
from scripts.soak import Report, Soak

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_threads_are_served_rightly_while_graphs_come_and_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    monkeypatch.setattr(soak, "CHECKED", 3)
    arguments = "--model qwen2_5_vl:tiny --threads 3 --streams 2 --seconds 12 --between 0.7"
    assert soak.main([*arguments.split(), "--largest", "8", "--device", device]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == []
    assert report["checked"] >= 1
    assert report["worst"] <= 1
    assert report["is_flat"]
    assert report["changes"]


def test_it_ends_after_so_many_calls(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model qwen2_5_vl:tiny --threads 1 --seconds 200 --between 0.2 --calls 2"
    assert soak.main([*arguments.split(), "--largest", "4", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"] >= 2


def test_a_wrong_value_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CHECKED", 1)
    monkeypatch.setattr(soak, "largest_error", lambda *_: 1.0)
    test = Soak("qwen2_5_vl:tiny", torch.device("cpu"), threads=1, streams=1, largest=4)
    report = test.run(20, soak.GraphConfig(max_graphs=2), 0.2)
    assert any("is off by" in error for error in report.errors)


@pytest.mark.parametrize(
    ("samples", "flat"),
    [([], True), ([1e3] * 9, True), ([1, 2, 3, 1e3, 1e3, 1e3, 1e3, 1e3, 1e3], True)],
)
def test_memory_may_grow_in_the_beginning_only(samples: list[float], flat: bool) -> None:
    assert Report(reserved_mib=samples).is_flat() is flat
    more: Any = [1e3 * (1 + i / 10) for i in range(12)]
    assert not Report(reserved_mib=more).is_flat()
    assert not Report(allocated_mib=more).is_flat()
