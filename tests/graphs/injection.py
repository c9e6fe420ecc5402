"""Captures of every kind with a failure at any step, and what must be as before it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mmgraph import current_forward_context, eager_break
from mmgraph.graphs import CapturedGraph, GraphBackend, capture_exact, clean_up
from mmgraph.graphs.backend import Runnable
from mmgraph.graphs.breakable import capture_breakable
from mmgraph.graphs.gc_freeze import frozen_by_somebody

Buffers = Mapping[str, torch.Tensor]
Capture = Callable[[GraphBackend, Runnable, Buffers], CapturedGraph]

KINDS: dict[str, Capture] = {
    "full": lambda backend, run, buffers: backend.capture(run, buffers),
    "pieces": lambda backend, run, buffers: capture_breakable(backend, run, buffers),
    "exact": lambda backend, run, buffers: capture_exact(backend, run, buffers, []),
}
CALLS = {
    ("cpu", "full"): ["warm-up", "recorded"],
    ("cpu", "pieces"): ["warm-up", "recorded"],
    ("cpu", "exact"): ["first", "observed", "warm-up", "recorded"],
    ("cuda", "full"): ["warm-up", "guarded", "recorded"],
    ("cuda", "pieces"): ["warm-up", "guarded", "recorded"],
    ("cuda", "exact"): ["first", "observed", "warm-up", "second warm-up", "recorded"],
}
"""What the calls of a runnable are for, in order."""
OPERATIONS = 6
"""Places in `Steps` where it may fail; number 3 is in a break."""


class Injected(Exception):
    """A failure of a test."""


class Steps:
    """Operations with a break in the middle; fails at a given place of a given call."""

    def __init__(self) -> None:
        self.calls = 0
        self.place = 0
        self.fails_at: tuple[int, int] | None = None
        self.error: type[BaseException] = Injected

    def __call__(self, buffers: Buffers) -> list[torch.Tensor]:
        self.calls += 1
        self.place = 0
        y = self._at(lambda: buffers["x"] * 2)
        y = self._at(y.sin)
        y = self._at(lambda: y + 1)
        z = self._in_a_break(y)
        z = self._at(lambda: z.cos() + y)
        return [self._at(lambda: z * 3)]

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).sin() + 1
        return ((y * 0.5).cos() + y) * 3

    def _at(self, operation: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.fails_at == (self.calls, self.place):
            raise self.error("injected")
        self.place += 1
        return operation()

    @property
    def _in_a_break(self) -> Any:
        return eager_break(lambda y: self._at(lambda: y * 0.5))


def fail_at_call(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: type[BaseException],
    *,
    nth: int = 1,
    after: bool = False,
) -> list[int]:
    """Let the `nth` call of a function fail, before or after it has done its work.

    Returns:
        A list that holds the number of calls.
    """
    original, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] != nth:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise error("injected")

    monkeypatch.setattr(owner, name, failing)
    return calls


def state(device: str) -> dict[str, Any]:
    """What a capture that fails must leave as it was."""
    found: dict[str, Any] = {
        "collector": (gc.isenabled(), frozen_by_somebody()),
        "functions": (gc.collect, torch.cuda.empty_cache, torch.cuda.is_current_stream_capturing),
        "modes": (_get_current_dispatch_mode_stack(), _get_current_function_mode_stack()),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "context": current_forward_context(),
        "random numbers": torch.get_rng_state().tolist(),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        clean_up()  # collects garbage too
        found["stream"] = (torch.cuda.current_device(), torch.cuda.current_stream())
        found["capturing"] = torch.cuda.is_current_stream_capturing()
        found["device's random numbers"] = torch.cuda.get_rng_state().tolist()
        found["memory"] = Bytes(torch.cuda.memory_allocated())
    return found


class Bytes(int):
    """Allocated memory: less is fine, and so are the few bytes of a generator's state.

    Tests that fail often in a row make sure that it doesn't add up.
    """

    def __eq__(self, before: object) -> bool:
        return isinstance(before, Bytes) and int(self) <= int(before) + 4096

    __hash__ = int.__hash__


def assert_fails(capture: Callable[[], Any], expected: type[BaseException]) -> None:
    """Unlike ``pytest.raises`` this keeps no traceback, and so no tensor."""
    try:
        capture()
    except BaseException as error:
        assert type(error) is expected, repr(error)  # noqa: PT017
    else:
        pytest.fail("the injected failure didn't happen")


def assert_follows(graph: CapturedGraph, x: torch.Tensor) -> None:
    """A replay is what the operations give for what the buffer holds now."""
    generator = torch.Generator(device=x.device)
    generator.manual_seed(3)
    x.normal_(generator=generator)
    torch.testing.assert_close(graph.replay()[0], Steps().expected(x))
