"""How long a call takes is the shortest of a few runs, of few if they are long."""

from __future__ import annotations

import pytest
import torch

from mmgraph.graphs import select_backend
from mmgraph.manager.verify import shortest


@pytest.mark.parametrize(
    ("durations", "expected", "runs"),
    [
        ([0.03, 0.01, 0.02, 9.0], 0.01, 3),
        ([0.15, 0.10, 9.0], 0.10, 2),
        ([0.50, 9.0], 0.50, 1),
    ],
)
def test_what_takes_long_is_run_less_often(
    durations: list[float], expected: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, now = list(durations), [0.0]
    monkeypatch.setattr("mmgraph.manager.verify.time.perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += left.pop(0)

    backend = select_backend("trace", torch.device("cpu"))
    assert shortest(backend, run) == pytest.approx(expected)
    assert len(durations) - len(left) == runs
