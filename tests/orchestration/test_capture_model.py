"""Capturing a whole model: each part under its own condition, and what happens without memory."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import mmgraph.attachment.rehearse
import mmgraph.orchestration
from mmgraph import (
    BatchDescriptor,
    CaptureError,
    CaptureSummary,
    CUDAGraphMode,
    CUDAGraphWrapper,
    DecoderGraphs,
    EncoderCudaGraphManager,
    EncoderState,
    GraphConfig,
    GraphKey,
    Reason,
    attach,
    capture_model,
    current_forward_context,
)
from mmgraph.graphs import select_backend
from mmgraph.graphs.gc_freeze import frozen_by_somebody
from mmgraph.recipes import load_recipe
from tests.manager.engine import EngineEncoder, call_of
from tests.orchestration.engine import BOTH, FULL, NONE, Engine, no_memory


class HungryEncoder(EngineEncoder):
    """Needs more memory than there is above a budget."""

    def __init__(self, runs_out_above: int) -> None:
        super().__init__()
        self.runs_out_above = runs_out_above

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        if key.token_budget > self.runs_out_above:
            raise no_memory()
        return super().encoder_forward(buffers, key)


def make_manager(
    device: str, encoder: EngineEncoder | None = None, **config: Any
) -> EncoderCudaGraphManager:
    encoder = (EngineEncoder() if encoder is None else encoder).requires_grad_(False).eval()
    config = {"token_budgets": (8, 16, 32), "max_items": 1, "capture": "upfront", **config}
    return EncoderCudaGraphManager(
        GraphConfig(**config), torch.device(device), torch.float32, encoder.to(device)
    )


def budgets_of(manager: EncoderCudaGraphManager) -> list[int]:
    return sorted(graph.key.token_budget for graph in manager.stats().graphs)


def assert_answers(manager: EncoderCudaGraphManager, device: str, tokens: int) -> None:
    call = call_of([tokens])
    call["patches"] = call["patches"].to(device)
    (output,), (expected,) = manager.execute(call), manager.model.embed_multimodal(**call)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def flag(open_: bool, eager: bool) -> dict[str, Any]:
    return {"cudagraph_mm_encoder": open_, "enforce_eager": eager}


ENCODERS = [None, flag(True, False), flag(False, False), flag(True, True)]


@pytest.mark.parametrize("as_state", [False, True])
@pytest.mark.parametrize(
    ("encoder", "mode", "enforce_eager"),
    list(itertools.product(ENCODERS, [None, NONE, FULL], [False, True])),
)
def test_each_part_has_its_own_condition(
    encoder: dict[str, Any] | None,
    mode: CUDAGraphMode | None,
    enforce_eager: bool,
    as_state: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, manager = Engine("cpu"), None
    decoder = None if mode is None else engine.decoder(mode)
    part: Any = None
    if encoder is not None:
        manager = make_manager("cpu", **encoder)
        part = manager
        if as_state:
            part = EncoderState.build(
                manager.model, manager.config, torch.device("cpu"), torch.float32
            )
            manager = part.manager
    encoder_runs = encoder == flag(True, False)
    decoder_runs = mode is FULL and not enforce_eager

    summary = capture_model(encoder=part, decoder=decoder, enforce_eager=enforce_eager)

    assert (manager is not None and len(budgets_of(manager)) == 3) is encoder_runs
    assert (len(engine.runs) == 3) is decoder_runs
    assert (summary.encoder_graphs, summary.decoder_graphs) == (3 * encoder_runs, 3 * decoder_runs)
    reasons = [None, None, Reason.DISABLED, Reason.ENFORCE_EAGER]
    assert summary.encoder_reason is reasons[ENCODERS.index(encoder)]
    expected = None
    if mode is not None and not decoder_runs:
        expected = Reason.ENFORCE_EAGER if enforce_eager else Reason.MODE_NONE
    assert summary.decoder_reason is expected
    warnings = [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name == "mmgraph.orchestration"
    ]
    assert len(warnings) == (not encoder_runs and not decoder_runs)
    for warning in warnings:
        assert "GraphConfig(cudagraph_mm_encoder=True)" in warning
        assert "CUDAGraphMode" in warning


class Bar:
    """Stands in for tqdm."""

    made: list[Bar]

    def __init__(self, *, total: int, desc: str, disable: bool) -> None:
        self.total, self.disable, self.count = total, disable, 0
        self.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self) -> None:
        self.count += 1


@pytest.mark.parametrize("progress", [False, True])
def test_the_encoder_comes_first_in_one_freeze_with_one_bar(
    device: str, progress: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freeze, frozen = gc.freeze, []
    engine, manager = Engine(device), make_manager(device, max_graphs=2)
    decoder = engine.decoder(BOTH)

    def freezing() -> None:
        frozen.append((len(engine.runs), budgets_of(manager)))
        freeze()

    def dummy_run(descriptor: BatchDescriptor) -> Any:
        assert budgets_of(manager) == [16, 32]  # max_graphs
        assert not gc.isenabled()
        assert frozen_by_somebody()
        return engine.dummy_run(descriptor)

    Bar.made = []
    monkeypatch.setattr(mmgraph.orchestration, "tqdm", Bar)
    monkeypatch.setattr(gc, "freeze", freezing)
    caplog.set_level(logging.INFO, "mmgraph.orchestration")
    decoder._dummy_run = dummy_run
    summary = capture_model(encoder=manager, decoder=decoder, progress=progress)
    assert frozen == [(0, [])]
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)
    (bar,) = Bar.made
    assert (bar.total, bar.count, bar.disable) == (2 + 6, 2 + 6, not progress)
    assert (summary.encoder_graphs, summary.decoder_graphs, summary.graphs) == (2, 9, 11)
    assert summary.encoder_reason is Reason.GRAPH_LIMIT
    assert summary.decoder_reason is None
    assert summary.seconds > 0
    assert summary.num_bytes == summary.encoder_bytes + summary.decoder_bytes
    (message,) = [r.getMessage() for r in caplog.records if r.name == "mmgraph.orchestration"]
    assert message == (
        f"11 graphs captured in {summary.seconds:.1f} s, {summary.num_bytes / 2**20:.1f} MiB"
    )


def test_the_bytes_of_the_encoder_are_what_its_capture_returns(device: str) -> None:
    first = make_manager(device)
    expected = first.capture()
    summary = capture_model(encoder=make_manager(device))
    assert summary.encoder_bytes == expected > 0
    assert summary.decoder_bytes == 0


@pytest.mark.gpu
def test_the_bytes_of_the_decoder_are_what_its_graphs_keep() -> None:
    backend = select_backend("cuda", torch.device("cuda"))
    x = torch.randn(1 << 24, device="cuda")
    wrapper = CUDAGraphWrapper(lambda y: ((y * 2).sin() + 1).cos(), FULL, backend=backend)
    decoder = DecoderGraphs(lambda _: wrapper(x), FULL, [BatchDescriptor(1)])
    summary = capture_model(decoder=decoder)
    size = x.numel() * x.element_size()
    assert size <= summary.decoder_bytes <= 4 * size


def test_without_memory_for_large_budgets_smaller_ones_are_captured(device: str) -> None:
    manager, engine = make_manager(device, HungryEncoder(16)), Engine(device)
    summary = capture_model(encoder=manager, decoder=engine.decoder(FULL))
    assert budgets_of(manager) == [8, 16]
    assert summary.encoder_reason is Reason.OUT_OF_MEMORY
    assert (summary.encoder_graphs, summary.decoder_graphs) == (2, 3)
    assert summary.decoder_reason is None
    assert manager.is_captured()
    for tokens in (8, 16, 32):
        assert_answers(manager, device, tokens)
    assert manager.stats().hits == 2
    assert list(manager._store.failed.values()) == [Reason.OUT_OF_MEMORY]


def test_without_memory_for_any_budget_the_encoder_is_eager_and_the_decoder_captured(
    device: str,
) -> None:
    manager, engine = make_manager(device, HungryEncoder(0)), Engine(device)
    summary = capture_model(encoder=manager, decoder=engine.decoder(FULL))
    assert summary == CaptureSummary(
        encoder_reason=Reason.OUT_OF_MEMORY,
        decoder_graphs=3,
        decoder_bytes=summary.decoder_bytes,
        seconds=summary.seconds,
    )
    assert not manager.is_captured()
    assert_answers(manager, device, 8)
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)
    with pytest.raises(CaptureError, match="out of memory"):
        manager.capture()


def test_without_memory_for_the_decoder_the_summary_says_so(device: str) -> None:
    engine = Engine(device)
    engine.fails = {(FULL, 16): no_memory()}
    summary = capture_model(decoder=engine.decoder(FULL))
    assert summary.decoder_reason is Reason.OUT_OF_MEMORY
    assert (summary.decoder_graphs, summary.encoder_graphs) == (2, 0)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("error", [ValueError("no such layer"), KeyboardInterrupt()])
def test_any_other_error_propagates_and_the_collector_is_as_it_was(
    device: str, part: str, error: BaseException
) -> None:
    class Failing(EngineEncoder):
        def encoder_forward(
            self, buffers: Mapping[str, torch.Tensor], key: GraphKey
        ) -> torch.Tensor:
            raise error

    engine = Engine(device)
    encoder = Failing() if part == "encoder" else EngineEncoder()
    if part == "decoder":
        engine.fails = {(FULL, 8): error}
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CaptureError
    with pytest.raises(expected):
        capture_model(encoder=make_manager(device, encoder), decoder=engine.decoder(FULL))
    assert (gc.isenabled(), frozen_by_somebody()) == (True, False)
    assert current_forward_context() is None


def test_a_later_budget_that_fails_is_no_error(device: str) -> None:
    encoder = EngineEncoder()
    encoder.fails_at = 16
    manager = make_manager(device, encoder)
    summary = capture_model(encoder=manager)
    assert budgets_of(manager) == [8, 32]
    assert summary.encoder_reason is Reason.CAPTURE_FAILED
    assert summary.encoder_graphs == 2


CONFIG: dict[str, Any] = {"capture": "lazy", "row_budgets": (1, 2)}


def clip(device: str) -> Any:
    return load_recipe("clip:tiny").build_model(device=device)


def test_an_attached_model_is_rehearsed_once_and_captured(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(clip(device), GraphConfig(**CONFIG)) as handle:
        rehearse, rehearsed = mmgraph.attachment.rehearse.rehearse, []

        def counting(*arguments: Any) -> None:
            rehearsed.append(len(handle.stats().graphs))
            rehearse(*arguments)

        monkeypatch.setattr("mmgraph.attachment.handle.rehearse", counting)
        summary = capture_model(encoder=handle)
        assert rehearsed == [0]
        assert summary.encoder_graphs == len(handle.stats().graphs) == 2
        assert summary.encoder_bytes > 0
        assert summary.encoder_reason is None
        assert capture_model(encoder=handle).encoder_graphs == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"cudagraph_mm_encoder": False}, Reason.DISABLED),
        ({"enforce_eager": True}, Reason.ENFORCE_EAGER),
    ],
)
def test_an_attached_model_with_a_closed_gate_is_not_captured(
    config: dict[str, Any], reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(clip("cpu"), GraphConfig(**CONFIG, **config)) as handle:
        assert capture_model(encoder=handle) == CaptureSummary(encoder_reason=reason)
        assert handle.stats().graphs == ()
    assert "nothing is captured" in caplog.text


def test_a_tower_that_can_not_be_captured_is_named_and_others_are() -> None:
    model = load_recipe("clip:tiny").build_model(device="meta")
    with attach(model, GraphConfig(**CONFIG)) as handle:
        assert capture_model(encoder=handle).encoder_reason is Reason.PLACEMENT
