"""How ``scripts.bench_traces`` times the kinds of calls of a trace: all ways in turn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from mmgraph import EncoderStats
from scripts.traces_records import Kind, Result, is_frequent

__all__ = ["Lane", "Race"]

_CLOSE = 0.9
"""Of eager mode's time, from which all are timed some more times, to see which is faster."""
_MORE = 4
_TRIES = 3
"""How often a rare kind is called, at most, for a call in which nothing is captured."""
_LONGEST_PAUSE_S = 0.04

Arguments = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Lane:
    """A way on a trace.

    Attributes:
        tower: Its own tower.
        call: The arguments of a call of a kind.
        stats: Counters of the tower.
        plan: Plans a call of a kind, and captures what it wants, without computing it.
        is_ours: Whether it is held against eager mode.
        result: What was found.
    """

    tower: Callable[..., Any]
    call: Callable[[Kind], Arguments]
    stats: Callable[[], EncoderStats] = EncoderStats
    plan: Callable[[Kind], None] = lambda _: None
    is_ours: bool = False
    result: Result = field(default_factory=Result)


class Race:
    """Times ways, each kind of call by all of them before the next kind comes.

    They come in another order each time, and before each is a pause as long as the call before it:
    in one order, a way that came after one that works the GPU hardest was 4 to 10 % slower in the
    same graphs.

    Args:
        eager: Eager mode.
        others: The other ways.
        repeats: How often each way is timed on a frequent kind.
        wait: Waits for the device.
        clock: Tells seconds.
        sleep: Lets some pass.
    """

    def __init__(
        self,
        eager: Lane,
        others: Sequence[Lane],
        *,
        repeats: int,
        wait: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self._order = Random(0)
        self._before = 0.0
        """Seconds of the last call."""
        self._eager = eager
        self._lanes = [eager, *others]
        self._repeats = repeats
        self._wait = wait
        self._clock = clock

    def run(self, kinds: Sequence[Kind], counts: Counter[Kind], end: float) -> list[Kind]:
        """Time kinds until `end`, but at least the first one; return those that were timed."""
        timed = list[Kind]()
        for kind in kinds:
            if timed and self._clock() >= end:
                break
            self._time(kind, counts[kind])
            timed.append(kind)
        return timed

    def _time(self, kind: Kind, count: int) -> None:
        frequent = is_frequent(count)
        for lane in self._lanes if frequent else ():
            lane.result.settling_s += self._once(lane, lane.call(kind))
        for _ in range(self._repeats if frequent else 1):
            for lane in self._shuffled():
                self._note(lane, kind, tries=1 if frequent else _TRIES)
        eager = self._eager.result.seconds[kind]
        is_close = any(
            lane.is_ours and lane.result.seconds[kind] > _CLOSE * eager for lane in self._lanes
        )
        for _ in range(_MORE if is_close else 0):  # all of them: the fastest call counts
            for lane in self._shuffled():
                self._note(lane, kind)

    def _shuffled(self) -> list[Lane]:
        return self._order.sample(self._lanes, len(self._lanes))

    def _note(self, lane: Lane, kind: Kind, tries: int = 1) -> None:
        """Time a call, and again while graphs were captured in it; the fastest one counts."""
        result, call = lane.result, lane.call(kind)
        for left in reversed(range(tries)):
            before = lane.stats()
            seconds = self._once(lane, call)
            after = lane.stats()
            if not left or _keys(before) == _keys(after):
                break
            result.settling_s += seconds
        result.seconds[kind] = min(seconds, result.seconds.get(kind, seconds))
        padding = after.padding - before.padding
        result.tokens[kind] = after.tokens - before.tokens + padding, padding

    def _once(self, lane: Lane, call: Arguments) -> float:
        self._wait()
        self._sleep(min(self._before, _LONGEST_PAUSE_S))
        start = self._clock()
        lane.tower(**call)
        self._wait()
        self._before = self._clock() - start
        return self._before


def _keys(stats: EncoderStats) -> set[object]:
    return {graph.key for graph in stats.graphs}
