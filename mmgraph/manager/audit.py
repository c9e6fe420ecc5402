"""Comparing one call in N with eager mode while serving.

Nothing waits: the difference is computed on the device, copied to pinned memory, and read at a
later call when it has arrived. A tower whose graphs differ is left in eager mode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from mmgraph.log import WarnOnce, get_logger
from mmgraph.manager.verify import max_error

__all__ = ["Audit"]


class _Verdict:
    """An error on its way to the host."""

    def __init__(self, error: torch.Tensor, limit: float) -> None:
        self.limit = limit
        self._event: torch.cuda.Event | None = None
        if error.is_cuda:
            self._host = torch.empty((), pin_memory=True)
            self._host.copy_(error, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(error.device))
        else:
            self._host = error

    @property
    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def error(self) -> float:
        return float(self._host)


class Audit:
    """Checks every `every`-th call that graphs served; 0 means none."""

    def __init__(self, every: int, name: str) -> None:
        self._every = every
        self._name = name
        self._calls = 0
        self._pending: deque[_Verdict] = deque()
        self._failed = False
        self._warn_once = WarnOnce(get_logger(__name__))

    def is_due(self) -> bool:
        """Count a call; whether it is one to compare."""
        if not self._every:
            return False
        self._calls += 1
        return self._calls % self._every == 0

    @torch.no_grad()
    def compare(self, ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
        """Note how far `ours` is from `eager`, without waiting for the device."""
        same = [a.shape for a in ours] == [b.shape for b in eager]
        errors = [_error(a, b) for a, b in zip(ours, eager, strict=False)] if same else []
        worst = torch.stack(errors).amax() if errors else torch.tensor(float("inf"))
        self._pending.append(_Verdict(worst, max_error(eager)))

    def skipped(self, error: Exception) -> None:
        """Note that a call couldn't be compared."""
        self._warn_once("skipped", "%s: a call couldn't be compared: %s", self._name, error)

    def failed(self) -> bool:
        """Whether a comparison whose result is there went wrong."""
        while self._pending and self._pending[0].is_there:
            verdict = self._pending.popleft()
            if not verdict.error <= verdict.limit:
                self._failed = True
                self._warn_once(
                    "differs",
                    "%s: a replay differed from eager mode by %.1e; it runs in eager mode from now "
                    "on, until clear()",
                    self._name,
                    verdict.error,
                )
        return self._failed

    def reset(self) -> None:
        """Trust graphs again."""
        self._failed = False
        self._pending.clear()


def _error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative error in the Frobenius norm, as a number on the device; inf where NaNs differ."""
    a, b = a.double(), b.double()
    nans = (a.isnan() != b.isnan()).any()
    a, b = a.nan_to_num(), b.nan_to_num()
    relative = (a - b).norm() / b.norm().clamp_min(1e-30)
    return torch.where(nans, torch.full_like(relative, float("inf")), relative).float()
