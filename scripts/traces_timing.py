"""How ``scripts.bench_traces`` times the kinds of calls of a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from mmgraph import EncoderStats
from mmgraph.encoders import eager_towers
from scripts.traces_records import Kind, Result, Turn, is_frequent, tokens_of

__all__ = ["CPU", "KindTimer"]

CPU = torch.device("cpu")
_CLOSE = 0.9
"""Of eager mode's time, from which a call of mmgraph is timed again, in turn with eager mode."""
_TURNS = 4
_TRIES = 3
"""How often a rare kind is called, at most, for a call in which nothing is captured."""


class KindTimer:
    """Times calls of a packed tower.

    Args:
        tower: The tower.
        device: Where it is.
        repeats: How often each frequent kind of call is timed.
        clock: Tells seconds.
    """

    def __init__(
        self,
        tower: nn.Module,
        device: torch.device,
        repeats: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tower = tower
        self.device = device
        self._repeats = repeats
        self._clock = clock
        self._patches = torch.empty(0)
        """Of the largest call; the others take the first of them."""

    def _call(self, kind: Kind, grids_on: torch.device) -> dict[str, torch.Tensor]:
        grid = torch.tensor(kind, dtype=torch.int64, device=grids_on)
        return {"hidden_states": self._patches[: tokens_of(kind)], "grid_thw": grid}

    def _time(
        self,
        turn: Turn,
        grids_on: torch.device,
        settling: int,
        stats: Callable[[], EncoderStats] = EncoderStats,
    ) -> Result:
        calls = {kind: self._call(kind, grids_on) for kind in turn.kinds[: turn.reach]}
        result = Result()
        settled = self._settle(turn, calls, settling)
        result.settling_s = self._clock() - turn.start
        for kind, call in calls.items():
            if result.seconds and self._clock() >= turn.end:
                break
            frequent = is_frequent(turn.counts[kind])
            if frequent and kind not in settled:
                result.settling_s += self._once(call)
            repeats = self._repeats if frequent else 1
            for _ in range(1 if frequent else _TRIES):
                before = stats()
                seconds = [self._once(call) for _ in range(repeats)]
                after = stats()
                if _keys(before) == _keys(after):
                    break
            result.seconds[kind] = min(seconds)
            if result.seconds[kind] > _CLOSE * turn.eager.get(kind, float("inf")):
                ours, eager = self._in_turn_with_eager(kind, call)
                result.seconds[kind] = min(result.seconds[kind], ours)
                result.against_eager[kind] = ours / eager
            padding = after.padding - before.padding
            result.tokens[kind] = after.tokens - before.tokens + padding, padding
        result.settling_s = round(result.settling_s, 3)
        return result

    def _in_turn_with_eager(
        self, kind: Kind, call: Mapping[str, torch.Tensor]
    ) -> tuple[float, float]:
        """The fastest of a few calls, and of as many in eager mode that take turns with them."""
        in_eager, ours, eager = self._call(kind, self.device), list[float](), list[float]()
        for _ in range(_TURNS):
            ours.append(self._once(call))
            with eager_towers():
                eager.append(self._once(in_eager))
        return min(ours), min(eager)

    def _settle(
        self, turn: Turn, calls: Mapping[Kind, Mapping[str, torch.Tensor]], settling: int
    ) -> set[Kind]:
        """Make calls of each kind before it is timed; return those that there was time for."""
        settled: set[Kind] = set()
        if settling == 1:  # one before each is timed will do
            return settled
        for kind, call in calls.items():
            if not is_frequent(turn.counts[kind]):
                continue
            for _ in range(min(settling, turn.counts[kind])):
                if kind != turn.kinds[0] and self._clock() >= turn.settled:
                    return settled
                self._once(call)
                settled.add(kind)
        return settled

    def _once(self, call: Mapping[str, torch.Tensor]) -> float:
        self._wait()
        start = self._clock()
        self.tower(**call)
        self._wait()
        return self._clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _keys(stats: EncoderStats) -> set[object]:
    return {graph.key for graph in stats.graphs}
