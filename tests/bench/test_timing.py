from __future__ import annotations

from time import sleep

import pytest

from mmgraph.bench.timing import Timing, calls_per_second, measure, percentile


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, 1),
        (30, 30),  # below 100 values the largest
        (99, 99),
        (100, 99),  # the first count at which one value may lie above
        (101, 100),
        (200, 198),
    ],
)
def test_p99_is_the_nearest_rank(count: int, expected: int) -> None:
    values = [float(n) for n in range(count, 0, -1)]
    assert percentile(values, 99) == expected


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="of 0 values"):
        percentile([], 99)


def test_a_timing_sums_up_nanoseconds() -> None:
    spans = [(3_000_000, 40_000), (1_000_000, 10_000), (2_000_000, 20_000), (9_000_000, 90_000)]
    assert Timing.of(spans) == Timing(n=4, median_ms=2.5, p99_ms=9.0, min_ms=1.0, host_us=30.0)


def test_calls_take_turns_and_each_waits_for_the_device() -> None:
    log: list[str] = []
    calls = {name: lambda name=name: log.append(name) for name in "abc"}
    timings = measure(calls, repeats=2, warmup=1, synchronize=lambda: log.append("-"))
    assert {name: timing.n for name, timing in timings.items()} == dict.fromkeys("abc", 2)
    assert "".join(log) == "-a--b--c-" + "-b--c--a-" + "-c--a--b-"


def test_calls_back_to_back_wait_for_the_device_at_the_end_only() -> None:
    log: list[str] = []
    rate = calls_per_second(lambda: log.append("a"), repeats=4, synchronize=lambda: log.append("-"))
    assert "".join(log) == "a-" + "aaaa" + "-"
    assert rate > 0


def test_a_rate_is_calls_a_second() -> None:
    assert calls_per_second(lambda: sleep(0.02), repeats=5, synchronize=lambda: None) < 50
