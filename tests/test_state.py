"""The state: three gates, of which each closed one is named with the way to open it."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from mmgraph import (
    ConfigError,
    EncoderCudaGraphManager,
    EncoderRunner,
    EncoderState,
    GraphConfig,
    Reason,
    UnsupportedModelError,
)
from mmgraph.state import Gate
from tests.manager.engine import EngineEncoder, MeasuredBackend, call_of, make_encoder

CPU = torch.device("cpu")
METHODS = (  # besides embed_multimodal, which a model needs to be served at all
    "encoder_facts",
    "item_specs",
    "select_items",
    "capture_inputs",
    "replay_inputs",
    "encoder_forward",
)


class EagerOnly:
    """A model that can encode, and no more."""

    def embed_multimodal(self, **mm_kwargs: Any) -> Any:
        return make_encoder().embed_multimodal(**mm_kwargs)


MODELS = {True: make_encoder(), False: EagerOnly()}


def build(config: GraphConfig, model: Any, **more: Any) -> EncoderState:
    return EncoderState.build(model, config, CPU, torch.float32, **more)


def first_closed(enforce_eager: bool, flag: bool, supports: bool) -> Gate | None:
    if enforce_eager:
        return Gate.ENFORCE_EAGER
    if not flag:
        return Gate.CONFIG_FLAG
    return None if supports else Gate.MODEL


@pytest.mark.parametrize(
    ("enforce_eager", "flag", "supports"), list(itertools.product([True, False], repeat=3))
)
def test_there_are_graphs_only_behind_three_open_gates(
    enforce_eager: bool, flag: bool, supports: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmgraph")
    config = GraphConfig(enforce_eager=enforce_eager, cudagraph_mm_encoder=flag)
    model = MODELS[supports]
    state = build(config, model)
    closed = first_closed(enforce_eager, flag, supports)
    assert state.closed is closed
    assert (state.manager is None) == (closed is not None)
    assert state.runner.manager is state.manager
    assert state.runner.model is model
    assert state.runner.has_cudagraph() == (closed is None)
    said = [record.getMessage() for record in caplog.records if record.name == "mmgraph.state"]
    expected = [] if closed is None else [f"the encoder runs in eager mode: {closed.value}"]
    assert said == expected
    call = call_of([4])
    (output,) = model.embed_multimodal(**call)
    assert output.shape == (2, 8)


@pytest.mark.parametrize(
    ("gate", "text", "reason"),
    [
        (
            Gate.ENFORCE_EAGER,
            "enforce_eager is set: use GraphConfig(enforce_eager=False)",
            Reason.ENFORCE_EAGER,
        ),
        (
            Gate.CONFIG_FLAG,
            "cudagraph_mm_encoder is off: use GraphConfig(cudagraph_mm_encoder=True)",
            Reason.DISABLED,
        ),
        (
            Gate.MODEL,
            "the model doesn't implement SupportsEncoderCudaGraph: implement its seven methods",
            Reason.UNSUPPORTED_MODEL,
        ),
    ],
)
def test_a_gate_says_how_to_open_it_and_what_it_is_counted_as(
    gate: Gate, text: str, reason: Reason
) -> None:
    assert gate.value == text
    assert gate.reason is reason


def test_every_gate_has_a_reason_of_its_own() -> None:
    assert len({gate.reason for gate in Gate}) == len(Gate)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_model_that_can_not_encode_is_an_error_whatever_the_gates(enforce_eager: bool) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^Linear has no embed_multimodal\(\*\*mm_kw"):
        build(GraphConfig(enforce_eager=enforce_eager), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_lacks_one_method_stays_behind_the_third_gate(method: str) -> None:
    class Partial(EagerOnly):
        pass

    for name in METHODS:
        if name != method:
            setattr(Partial, name, getattr(EngineEncoder, name))
    assert build(GraphConfig(), Partial()).closed is Gate.MODEL


def test_a_closed_gate_needs_no_valid_budgets_and_makes_no_manager() -> None:
    bad = {"token_budgets": (3,), "max_items": 1}
    assert build(GraphConfig(enforce_eager=True, **bad), make_encoder()).manager is None
    with pytest.raises(ConfigError, match="must be multiples of 2"):
        build(GraphConfig(**bad), make_encoder())


def test_parts_are_built_with_what_was_given() -> None:
    backend, config = MeasuredBackend(), GraphConfig(token_budgets=(8,), max_items=4)
    state = build(config, make_encoder(), backend=backend, timing=True)
    assert type(state.manager) is EncoderCudaGraphManager
    assert type(state.runner) is EncoderRunner
    assert state.manager.backend is backend
    assert state.manager.config is config
    assert state.runner.timings() == {}
    with pytest.raises(ConfigError, match="timing=True"):
        build(config, make_encoder()).runner.timings()
