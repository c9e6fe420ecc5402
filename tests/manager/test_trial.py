"""Steps for speed are kept only where a graph with them is right and faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import mmgraph.manager.store
from mmgraph import GraphConfig
from mmgraph.bench.inputs import tower_inputs
from mmgraph.encoders import encoder_for, find_towers
from mmgraph.graphs import CapturedGraph
from mmgraph.graphs.backend import Runnable
from mmgraph.graphs.trace import TraceBackend
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.preparation import Preparation
from mmgraph.recipes import load_recipe


class Timed(TraceBackend):
    """Counts the graphs that are there when another is captured."""

    is_timed = True
    num_bytes = 0
    """That each graph is said to take."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[CapturedGraph] = []
        self.closed: list[CapturedGraph] = []
        self.others: list[int] = []

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: object = None
    ) -> CapturedGraph:
        self.others.append(len(self.graphs) - len(self.closed))
        return self._counted(super().capture(run, buffers, like))

    def _counted(self, graph: CapturedGraph) -> CapturedGraph:
        graph.num_bytes = self.num_bytes
        close = graph.close

        def noted() -> None:
            self.closed.append(graph)
            close()

        graph.close = noted  # type: ignore[method-assign]
        self.graphs.append(graph)
        return graph


class Trial:
    """A tower whose blocks are "compiled" to what a test wants, timed as it wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factor = 1.0
        self.seconds: dict[bool, float] = {True: 1.0, False: 2.0}
        self.error: Exception | None = None
        self.captured: list[bool] = []
        self.tower: nn.Module = load_recipe("siglip:tiny").build_encoder()
        tower = find_towers(self.tower)[0]
        self.preparation = Preparation(self.tower, "tower", compile_blocks=True)
        self.encoder = encoder_for(tower, "forward", self.preparation)
        monkeypatch.setattr("mmgraph.preparation.preparation.compiled_blocks", self._compiled)
        monkeypatch.setattr("mmgraph.manager.trial.shortest", self._shortest)
        monkeypatch.setattr(mmgraph.manager.store.GraphStore, "_measure", lambda *_: None)
        self.backend = Timed()
        self.manager = EncoderCudaGraphManager(
            GraphConfig(row_budgets=(1, 2)),
            torch.device("cpu"),
            torch.float32,
            self.encoder,
            backend=self.backend,
        )

    def call(self, rows: int) -> Any:
        side = self.tower.config.image_size
        x = torch.randn(rows, 3, side, side)
        ours = self.manager.run({"pixel_values": x})
        return ours.last_hidden_state, self.tower(x).last_hidden_state

    @contextmanager
    def _compiled(self, module: nn.Module, _: object) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        norm = next(m for m in module.modules() if isinstance(m, nn.LayerNorm))
        forward = norm.forward
        norm.__dict__["forward"] = lambda x: forward(x) * self.factor
        try:
            yield
        finally:
            del norm.__dict__["forward"]

    def _shortest(self, backend: Any, replay: Any) -> float:
        """The capturer times the graph without the steps first."""
        self.captured.append(bool(self.captured) and not self.captured[-1])
        return self.seconds[self.captured[-1]]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(monkeypatch)


@torch.no_grad()
def test_steps_that_are_faster_are_kept_for_all_budgets(trial: Trial) -> None:
    trial.factor = 1 + 1e-4  # within what probes allow, so that the tests can tell
    for rows in (1, 2):
        ours, plain = trial.call(rows)
        assert not torch.equal(ours, plain)
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    assert len(trial.captured) == 2  # one trial, at the first capture
    assert trial.preparation.no_compile is None
    assert not trial.preparation.on_trial


@torch.no_grad()
def test_steps_that_are_slower_are_dropped(trial: Trial) -> None:
    trial.factor, trial.seconds = 1 + 1e-4, {True: 3e-3, False: 2e-3}
    for rows in (1, 2):
        ours, plain = trial.call(rows)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert trial.preparation.no_compile == "3.00 ms, as they are 2.00 ms"
    assert len(trial.captured) == 2


@torch.no_grad()
@pytest.mark.parametrize("faster", [True, False])
def test_a_trial_never_holds_two_graphs(trial: Trial, faster: bool) -> None:
    """A pool is as large as the largest that was ever in it, and keeps that."""
    trial.seconds = {faster: 1.0, not faster: 2.0}
    trial.call(2)
    assert trial.backend.others == ([0, 0] if faster else [0, 0, 0])
    assert len(trial.backend.graphs) - len(trial.backend.closed) == 1
    assert trial.manager.stats().hits == 2


@torch.no_grad()
def test_steps_that_are_wrong_are_dropped(trial: Trial) -> None:
    trial.factor = 1.5
    for rows in (1, 2):
        ours, plain = trial.call(rows)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert "differs from eager mode" in str(trial.preparation.no_compile)
    assert trial.manager.stats().hits == 3


@torch.no_grad()
def test_steps_that_fail_are_dropped_with_a_warning(
    trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    trial.error = RuntimeError("no compiler here")
    ours, plain = trial.call(2)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert "no compiler here" in str(trial.preparation.no_compile)
    assert [r.levelname for r in caplog.records if "as they are" in r.message] == ["WARNING"]
    assert trial.manager.stats().hits == 2


class ExactTrial:
    """A tower that only exact graphs can serve, its blocks "compiled" to what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factor = 1 + 1e-4
        self.seconds: dict[bool, float] = {True: 1.0, False: 2.0}
        self.error: Exception | None = None
        self.timed: list[bool] = []
        self.recipe = load_recipe("qwen3_asr:tiny")
        self.tower: Any = self.recipe.build_encoder()
        (tower,) = find_towers(self.tower)
        self.preparation = Preparation(self.tower, "tower", compile_blocks=True)
        monkeypatch.setattr(torch, "compile", self._compiled)
        monkeypatch.setattr("mmgraph.preparation.blocks._get_current_dispatch_mode", lambda: None)
        monkeypatch.setattr("mmgraph.manager.trial.shortest", self._shortest)
        times = cycle([1.0, 2.0])  # a replay, eager mode
        monkeypatch.setattr("mmgraph.manager.exact.shortest", lambda *_: next(times))
        self.manager = EncoderCudaGraphManager(
            GraphConfig(mode="piecewise"),
            torch.device("cpu"),
            torch.float32,
            encoder_for(tower, "forward", self.preparation),
            backend=Timed(),
        )

    def call(self, clips: int) -> tuple[torch.Tensor, torch.Tensor]:
        call = tower_inputs(self.recipe, self.tower.config, [(400,)] * clips)
        for _ in range(2):
            ours = self.manager.run(call)
        return ours.last_hidden_state, self.tower(**call).last_hidden_state

    def _compiled(self, forward: Any, **_: Any) -> Any:
        def fast(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                raise self.error
            return tuple(x * self.factor for x in forward(*args, **kwargs))

        return fast

    def _shortest(self, backend: Any, replay: Any) -> float:
        self.timed.append(bool(self.timed) and not self.timed[-1])
        return self.seconds[self.timed[-1]]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> ExactTrial:
    return ExactTrial(monkeypatch)


@torch.no_grad()
def test_exact_graphs_hold_compiled_blocks_where_these_are_faster(exact: ExactTrial) -> None:
    for clips in (1, 2):
        ours, plain = exact.call(clips)
        assert not torch.equal(ours, plain)
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    assert exact.timed == [False, True]  # one trial
    assert exact.preparation.no_compile is None
    stats = exact.manager.stats()
    assert stats.hits == 3
    assert [graph.saved_ms for graph in stats.graphs] == [1e3, 1e3]  # a replay each
    first, second = stats.graphs
    assert second.compile_seconds == 0.0 <= first.compile_seconds


@torch.no_grad()
def test_exact_graphs_are_captured_plain_where_compiled_blocks_are_slower(
    exact: ExactTrial,
) -> None:
    exact.seconds = {True: 3e-3, False: 2e-3}
    for clips in (1, 2):
        torch.testing.assert_close(*exact.call(clips), rtol=1e-6, atol=1e-6)
    assert exact.preparation.no_compile == "3.00 ms, as they are 2.00 ms"
    assert exact.manager.stats().hits == 3


@torch.no_grad()
@pytest.mark.parametrize("tried_before", [False, True])
def test_an_exact_call_that_compiled_blocks_fail_on_is_captured_plain(
    exact: ExactTrial, tried_before: bool
) -> None:
    if tried_before:
        exact.call(1)
    exact.factor = 1.5
    torch.testing.assert_close(*exact.call(2), rtol=1e-6, atol=1e-6)
    given_up = exact.preparation.no_compile is not None
    assert given_up == (not tried_before)  # else it is this call's matter
    assert exact.manager.stats().hits == (3 if tried_before else 2)


@torch.no_grad()
def test_a_compiler_that_fails_on_an_exact_call_is_given_up(
    exact: ExactTrial, caplog: pytest.LogCaptureFixture
) -> None:
    exact.error = RuntimeError("no compiler here")
    torch.testing.assert_close(*exact.call(1), rtol=1e-6, atol=1e-6)
    assert "no compiler here" in str(exact.preparation.no_compile)
    assert [r.levelname for r in caplog.records if "as they are" in r.message] == ["WARNING"]
    assert exact.manager.stats().hits == 1


@torch.no_grad()
def test_where_no_block_is_recorded_another_way_nothing_is_decided(
    exact: ExactTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes later may hold compiled blocks; two equal graphs say nothing about these."""
    monkeypatch.setattr("mmgraph.graphs.regions._keeps_to_itself", lambda steps: False)
    for clips in (1, 2):
        torch.testing.assert_close(*exact.call(clips), rtol=1e-6, atol=1e-6)
    assert exact.preparation.on_trial
    assert len(exact.timed) == 1
    assert exact.manager.stats().hits == 3


@torch.no_grad()
@pytest.mark.parametrize("at", [0, 1])
def test_a_graph_that_can_not_be_timed_is_closed(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def fails(*_: Any) -> float:
        calls.append(None)
        if len(calls) > at:
            raise RuntimeError("a device that is gone")
        return 1.0

    calls: list[None] = []
    monkeypatch.setattr("mmgraph.manager.trial.shortest", fails)
    torch.testing.assert_close(*trial.call(2), rtol=1e-6, atol=1e-6)
    assert len(trial.backend.graphs) == len(trial.backend.closed) == at + 1
    assert trial.manager.stats().hits == 0


@torch.no_grad()
@pytest.mark.parametrize("keeps", [False, True])
def test_memory_that_stays_in_a_shared_pool_is_counted(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(Timed, "keeps_memory", keeps)
    monkeypatch.setattr(Timed, "num_bytes", 1024)
    trial.call(2)
    (graph,) = trial.manager.stats().graphs
    assert graph.num_bytes == (2048 if keeps else 1024)
