"""A manager whose encoder fails at any call of a capture answers on, and captures later."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from mmgraph import (
    CaptureError,
    EncoderCudaGraphManager,
    EncoderFacts,
    GraphConfig,
    GraphKey,
    Reason,
)
from mmgraph.graphs.trace import TracedGraph
from tests.graphs.injection import CALLS, Injected, assert_fails, fail_at_call, state
from tests.manager.engine import EngineEncoder, MeasuredBackend, call_of, make_manager


class FailingEncoder(EngineEncoder):
    """Fails after the work of its call number `fails_at` that is for a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fails_at: int | None = None
        self.error: type[BaseException] = Injected

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        self.calls += 1
        output = super().encoder_forward(buffers, key)
        if self.calls == self.fails_at:
            raise self.error("injected")
        return output


def device_manager(device: str) -> tuple[EncoderCudaGraphManager, FailingEncoder]:
    encoder = FailingEncoder().requires_grad_(False).eval().to(device)
    config = GraphConfig(token_budgets=(8, 16, 32), max_items=1)
    manager = EncoderCudaGraphManager(config, torch.device(device), torch.float32, encoder)
    return manager, encoder


def call_on(device: str, tokens: int) -> dict[str, Any]:
    call = call_of([tokens])
    return {**call, "patches": call["patches"].to(device)}


def assert_answers(manager: EncoderCudaGraphManager, device: str, tokens: int) -> None:
    call = call_on(device, tokens)
    (output,), (expected,) = manager.execute(call), manager.model.embed_multimodal(**call)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize(
    ("device", "fails_at"),
    [
        pytest.param(
            device,
            number,
            id=f"{device}-{call}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for device in ("cpu", "cuda")
        for number, call in enumerate(CALLS[device, "full"], 1)
    ],
)
def test_a_failure_in_any_call_of_a_capture(
    device: str, fails_at: int, upfront: bool, error: type[BaseException]
) -> None:
    manager, encoder = device_manager(device)
    for tokens in (32, 16, 8):  # what a first capture and a first call leave for good is there
        assert_answers(manager, device, tokens)
    manager.clear()
    encoder.calls, encoder.fails_at, encoder.error = 0, fails_at, error
    before = state(device)
    if error is Injected and not upfront:
        assert_answers(manager, device, 32)  # in eager mode
    else:
        capture = manager.capture if upfront else partial(manager.execute, call_on(device, 32))
        assert_fails(capture, CaptureError if error is Injected else error)
    assert encoder.calls == fails_at
    manager.clear()
    assert state(device) == before
    hits = manager.stats().hits
    for tokens in (32, 16, 8):
        assert_answers(manager, device, tokens)
    assert manager.stats().hits == hits + 3


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
def test_a_probe_that_fails_frees_the_graph(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], TracedGraph.close
    fails = [error]

    def closing(self: TracedGraph) -> None:
        closed.append(self)
        close(self)

    def probes(key: GraphKey) -> list[dict[str, Any]]:
        return [call_of([key.token_budget])]

    class Probed(EngineEncoder):
        def encoder_facts(self) -> EncoderFacts:
            return dataclasses.replace(super().encoder_facts(), probes=probes)

        def embed_multimodal(self, **mm_kwargs: Any) -> Any:
            if fails:
                raise fails.pop()("injected")
            return super().embed_multimodal(**mm_kwargs)

    monkeypatch.setattr(TracedGraph, "close", closing)
    manager = make_manager(Probed().requires_grad_(False).eval())
    if error is KeyboardInterrupt:
        assert_fails(partial(manager.execute, call_of([8])), error)
    else:
        assert_answers(manager, "cpu", 8)  # in eager mode
    assert len(closed) == 1
    assert manager.stats().graphs == ()
    manager.clear()
    assert_answers(manager, "cpu", 8)
    assert manager.stats().hits == 1


def test_an_error_of_our_own_in_a_capture_leaves_eager_mode() -> None:
    def probes(key: GraphKey) -> list[dict[str, Any]]:
        raise ValueError("no call is like this")

    class Probed(EngineEncoder):
        def encoder_facts(self) -> EncoderFacts:
            return dataclasses.replace(super().encoder_facts(), probes=probes)

    manager = make_manager(Probed().requires_grad_(False).eval())
    for _ in range(2):
        assert_answers(manager, "cpu", 8)
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 2}
    with pytest.raises(CaptureError, match="no call is like this"):
        manager.capture()


class TimedBackend(MeasuredBackend):
    is_timed = True


class ProbedEncoder(EngineEncoder):
    def encoder_facts(self) -> EncoderFacts:
        facts = super().encoder_facts()
        return dataclasses.replace(facts, probes=lambda key: [call_of([key.token_budget])])


STEPS = [
    "mmgraph.manager.store.BufferArena",
    "mmgraph.manager.store.shortest",
    "mmgraph.manager.eager_times.shortest",
    "mmgraph.manager.capture.private_caches",
    "mmgraph.manager.capture.record_layout",
    "mmgraph.manager.judge.largest_error",
    "tests.manager.engine.EngineEncoder.capture_inputs",
]


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_the_manager_that_fails(
    step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ProbedEncoder().requires_grad_(False).eval()
    manager = make_manager(encoder, TimedBackend(), max_items=1)
    before = state("cpu")
    with monkeypatch.context() as patch:
        owner, _, name = step.rpartition(".")
        calls = fail_at_call(patch, pkgutil.resolve_name(owner), name, error)
        if error is KeyboardInterrupt:
            assert_fails(partial(manager.execute, call_of([8])), error)
        else:
            assert_answers(manager, "cpu", 8)
            assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
            assert manager.stats().graphs == ()
        assert calls[0] >= 1
    assert state("cpu") == before
    manager.clear()
    for _ in range(2):
        assert_answers(manager, "cpu", 8)
    assert manager.stats().hits >= 1 or Reason.NOT_FASTER in manager.stats().misses
