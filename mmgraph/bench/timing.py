"""Timing: several callables in turn, so that a drift of the machine hits all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

__all__ = ["Call", "Timing", "calls_per_second", "measure", "percentile", "synchronizer"]

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Latency of a call by wall clock.

    Attributes:
        n: Calls that were timed.
        median_ms: From entry to the end of the device's work.
        p99_ms: Nearest rank: below 100 calls the slowest one.
        min_ms: The fastest one.
        host_us: Median microseconds from entry to return, without waiting for the device.
    """

    n: int
    median_ms: float
    p99_ms: float
    min_ms: float
    host_us: float

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]]) -> Timing:
        """Sum up (whole call, entry to return) in nanoseconds."""
        whole_ms = [whole / 1e6 for whole, _ in spans]
        return cls(
            n=len(spans),
            median_ms=median(whole_ms),
            p99_ms=percentile(whole_ms, 99),
            min_ms=min(whole_ms),
            host_us=median(host / 1e3 for _, host in spans),
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values don't exceed."""
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    rank = -(-percent * len(values) // 100)
    return sorted(values)[rank - 1]


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits for `device`; the CPU needs no waiting."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def measure(
    calls: Mapping[str, Call], *, repeats: int, warmup: int, synchronize: Callable[[], None]
) -> dict[str, Timing]:
    """Time `calls` round-robin; each round starts with another one.

    Args:
        calls: What to time, by name.
        repeats: Rounds that count.
        warmup: Rounds before them.
        synchronize: Waits for the device.
    """
    names = list(calls)
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for i in range(warmup + repeats):
        first = i % len(names)
        for name in (*names[first:], *names[:first]):
            span = _time(calls[name], synchronize)
            if i >= warmup:
                spans[name].append(span)
    return {name: Timing.of(spans[name]) for name in names}


def calls_per_second(call: Call, *, repeats: int, synchronize: Callable[[], None]) -> float:
    """Make `repeats` calls back to back and wait for the device once, at the end."""
    call()
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    synchronize()
    return repeats / (time.perf_counter_ns() - start) * 1e9


def _time(call: Call, synchronize: Callable[[], None]) -> tuple[int, int]:
    synchronize()
    start = time.perf_counter_ns()
    output = call()
    returned = time.perf_counter_ns()
    synchronize()
    stop = time.perf_counter_ns()
    del output  # it lived until here: freeing it is not part of the call
    return stop - start, returned - start
