"""Timing on the device: the host's part is hidden behind a kernel that spins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph.ops import compare, milliseconds
from mmgraph.ops.compare import is_off


class Device:
    """A clock of the host and one of the device; what is launched waits for what was before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launching: float, running: float) -> None:
        self.host = self.device = 0.0
        self.launching, self.running = launching, running
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.device = max(device.device, device.host)

            def synchronize(self) -> None:
                device.host = device.device

            def elapsed_time(self, end: Any) -> float:
                elapsed: float = 1e3 * (end.at - self.at)
                return elapsed

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self._queue(cycles / 2e9))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Event(enable_timing=True))
        monkeypatch.setattr(compare.time, "perf_counter", lambda: self.host)

    def _queue(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def run(self) -> None:
        self.host += self.launching
        self._queue(self.running)


@pytest.mark.parametrize("launching", [1e-6, 1e-4, 2e-3])
def test_what_is_slow_to_launch_counts_for_what_the_device_takes(
    monkeypatch: pytest.MonkeyPatch, launching: float
) -> None:
    device = Device(monkeypatch, launching, running=5e-5)
    assert milliseconds(device.run) == pytest.approx(0.05)


def test_rounding_isnt_off_and_what_isnt_finite_says_nothing() -> None:
    expected = torch.randn(100, 64)
    assert not is_off(expected.bfloat16(), expected)
    assert is_off(1.05 * expected, expected)
    output = expected.clone()
    expected[0, 0], output[0, 0] = torch.nan, 5.0
    expected[1], output[1] = torch.inf, 0.0
    assert not is_off(output, expected)
    output[2, 0] = torch.nan
    assert is_off(output, expected)


def test_one_row_of_many_is_seen_where_each_counts() -> None:
    expected = torch.randn(10_000, 16)
    output = expected.clone()
    output[77] = 0
    assert not is_off(output, expected)
    assert is_off(output, expected, each_row=True)
