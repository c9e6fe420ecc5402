"""Graphs of exact calls: which calls get one, when it serves, and what becomes of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import (
    CaptureError,
    ConfigError,
    EncoderCudaGraphManager,
    EncoderStats,
    GraphConfig,
    Reason,
    Refusal,
    UnsupportedModelError,
    attach,
)
from mmgraph.encoders.calls import TowerSignature
from mmgraph.encoders.exact import exact_call
from mmgraph.graphs import eager_break, select_backend
from mmgraph.graphs.trace import TraceBackend
from mmgraph.manager.contents import varied
from mmgraph.protocol import SupportsExactGraphs
from mmgraph.recipes import load_recipe
from mmgraph.types import ExactCall
from tests.manager.engine import (
    BUDGETS,
    CPU,
    EngineEncoder,
    MeasuredBackend,
    call_of,
    lengths_of,
    make_encoder,
    make_manager,
    tiny_encoder,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Make = Callable[..., EncoderCudaGraphManager]
ABOVE = [40]
"""Lengths that no budget of the engine's encoder holds."""


class ExactEngine(EngineEncoder):
    """An engine's encoder that can also have graphs of exact calls.

    Attributes:
        exact_calls: How often ``exact_forward`` ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exact_calls = 0
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.requires_grad_(False).eval()

    def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
        lengths = lengths_of(mm_kwargs)
        contents = {"patches": mm_kwargs["patches"]}
        others = {name: value for name, value in mm_kwargs.items() if name != "patches"}
        key = (contents["patches"].shape, tuple(lengths), mm_kwargs.get("scale"))
        return ExactCall(key, contents, others, sum(lengths))

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        self.exact_calls += 1
        return EngineEncoder.embed_multimodal(self, **mm_kwargs)


class Wrong(ExactEngine):
    """Computes something else for graphs."""

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return [output + 1 for output in super().exact_forward(**mm_kwargs)]


class WrongForOthers(ExactEngine):
    """Computes for graphs what is right for the contents that were there when it was captured."""

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        frozen = {**mm_kwargs, "patches": mm_kwargs["patches"] * 0 + self.first}
        return super().exact_forward(**frozen)

    def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
        self.first = mm_kwargs["patches"].clone()
        return super().exact_call(mm_kwargs)


class Failing(ExactEngine):
    """Has no way that suits a graph."""

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        raise ValueError("no such kernel")


class WithoutMemory(ExactEngine):
    """Finds no memory while a graph of it is captured."""

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")


class KeepsAgreeing(nn.Module):
    def forward(self, rows: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return rows[patches[::2, 0] * patches[::2, 1] > 0]


class DropsRows(ExactEngine):
    """How many rows it returns depends on what the patches hold."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = KeepsAgreeing()

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        (output,) = super().embed_multimodal(**mm_kwargs)
        return [self.keep(output, mm_kwargs["patches"])]

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        (output,) = super().exact_forward(**mm_kwargs)
        return [self.keep(output, mm_kwargs["patches"])]


class WritesToItsInputs(ExactEngine):
    """Scales the caller's own patches in place, which a call must see once."""

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        mm_kwargs["patches"].mul_(2)
        return super().embed_multimodal(**mm_kwargs)

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return super().exact_forward(**{**mm_kwargs, "patches": mm_kwargs["patches"] * 2})


class TimedBackend(TraceBackend):
    """Wants graphs to be faster than eager mode."""

    is_timed = True


class Clock:
    """Stands still but for what waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self) -> None:
        self.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("mmgraph.manager.verify.time", clock)
    return clock


class SlowGraph(ExactEngine):
    """Its graphs wait for something that eager mode doesn't need."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        @eager_break
        def waits(output: torch.Tensor) -> torch.Tensor:
            self.clock.wait()
            return output * 1

        return [waits(output) for output in super().exact_forward(**mm_kwargs)]


class SlowEager(ExactEngine):
    """Eager mode waits for something that its graphs don't need."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        self.clock.wait()
        return super().embed_multimodal(**mm_kwargs)


def manager_on(
    device: str, encoder: Any = None, backend: Any = None, **config: Any
) -> EncoderCudaGraphManager:
    encoder = (ExactEngine() if encoder is None else encoder).to(device)
    if backend is None:
        backend = select_backend("auto", torch.device(device))
        backend.is_timed = False  # how fast they are is the matter of two tests only
    settings = GraphConfig(**{"token_budgets": BUDGETS, **config})
    return EncoderCudaGraphManager(
        settings, torch.device(device), torch.float32, encoder, backend=backend
    )


@pytest.fixture(params=DEVICES)
def manager_of(request: pytest.FixtureRequest) -> Make:
    """Makes a manager on each device, with the backend that belongs there."""
    return partial(manager_on, str(request.param))


def call_for(
    manager: EncoderCudaGraphManager, lengths: Sequence[int], seed: int = 1, **more: Any
) -> dict[str, Any]:
    call = call_of(lengths, seed, **more)
    return {**call, "patches": call["patches"].to(manager.device)}


def assert_equals_eager(
    manager: EncoderCudaGraphManager, lengths: Sequence[int], seed: int, **more: Any
) -> None:
    """Run a call of new contents and compare it with the encoder itself."""
    encoder: Any = manager.model
    outputs = manager.execute(call_for(manager, lengths, seed, **more))
    expected = encoder.embed_multimodal(**call_for(manager, lengths, seed, **more))
    for output, item in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, item, rtol=1e-4, atol=1e-4)
    stats = manager.stats()
    assert stats.items == stats.hits + sum(stats.misses.values())


def counts(manager: EncoderCudaGraphManager) -> tuple[int, dict[Reason, int]]:
    stats = manager.stats()
    return stats.hits, stats.misses


def exact_graphs(stats: EncoderStats) -> list[int]:
    """Tokens of the calls that have graphs of their own, the least recently used first."""
    return [graph.key.token_budget for graph in stats.graphs if graph.key.exact is not None]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_call_that_no_budget_serves_gets_a_graph_the_second_time(manager_of: Make) -> None:
    manager = manager_of()
    assert isinstance(manager.model, SupportsExactGraphs)
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
        assert counts(manager) == (seed, {Reason.ABOVE_BUDGET: 1})
    (graph,) = manager.stats().graphs
    assert (graph.key.token_budget, graph.replays) == (40, 2)
    encoder: Any = manager.model
    captured = encoder.exact_calls
    assert_equals_eager(manager, ABOVE, 9)
    assert encoder.exact_calls == captured


def test_what_budgets_serve_gets_none(manager_of: Make) -> None:
    manager = manager_of()
    for seed in range(3):
        assert_equals_eager(manager, [8, 4], seed)
    assert exact_graphs(manager.stats()) == []
    assert counts(manager) == (6, {})


def test_items_above_the_budgets_among_others_have_a_graph_for_themselves(manager_of: Make) -> None:
    manager = manager_of()
    for seed in range(3):
        assert_equals_eager(manager, [8, 40, 4, 44], seed)
    assert counts(manager) == (4 + 4 + 2, {Reason.ABOVE_BUDGET: 2})
    assert exact_graphs(manager.stats()) == [84]


def test_a_tower_that_can_not_be_captured_for_budgets_has_exact_graphs(manager_of: Make) -> None:
    encoder = ExactEngine()
    encoder.fails_above = 0
    manager = manager_of(encoder)
    for seed in range(3):
        assert_equals_eager(manager, [8, 4], seed)
    assert counts(manager) == (4, {Reason.CAPTURE_FAILED: 2})


def test_other_sizes_and_other_constants_are_other_graphs(manager_of: Make) -> None:
    manager = manager_of()
    for seed in range(3):
        assert_equals_eager(manager, [40], seed)
        assert_equals_eager(manager, [36, 34], seed)
        assert_equals_eager(manager, [34, 36], seed)
        assert_equals_eager(manager, [40], seed, scale=2.0)
    assert exact_graphs(manager.stats()) == [40, 70, 70, 40]
    assert counts(manager) == (2 * 6, {Reason.ABOVE_BUDGET: 6})


def test_the_least_recently_used_graph_makes_room_and_has_to_be_seen_twice_again(
    manager_of: Make,
) -> None:
    manager = manager_of(max_graphs=2)
    for lengths in ([40], [42], [40], [42]):
        assert_equals_eager(manager, lengths, 1)
    assert exact_graphs(manager.stats()) == [40, 42]
    assert_equals_eager(manager, [40], 2)
    for _ in range(2):
        assert_equals_eager(manager, [44], 3)
    assert exact_graphs(manager.stats()) == [40, 44]
    hits = manager.stats().hits
    assert_equals_eager(manager, [42], 4)
    assert exact_graphs(manager.stats()) == [40, 44]
    assert manager.stats().hits == hits
    assert_equals_eager(manager, [42], 5)
    assert exact_graphs(manager.stats()) == [44, 42]
    assert manager.stats().evictions == 2
    manager.clear()
    assert manager.stats().evictions == 2
    for _ in range(2):
        assert_equals_eager(manager, [42], 5)
    assert all(graph.replays == 1 for graph in manager.stats().graphs)


def test_graphs_of_budgets_leave_no_room_for_others(manager_of: Make) -> None:
    manager = manager_of(max_graphs=1)
    assert_equals_eager(manager, [8], 1)
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (1, {Reason.ABOVE_BUDGET: 3})
    assert len(manager.stats().graphs) == 1


@pytest.mark.parametrize("upfront", [False, True])
def test_exact_graphs_give_way_to_those_of_budgets(manager_of: Make, upfront: bool) -> None:
    manager = manager_of(max_graphs=2)
    for lengths in ([40], [42], [40], [42]):
        assert_equals_eager(manager, lengths, 1)
    if upfront:
        manager.capture()
    else:
        assert_equals_eager(manager, [8], 1)
    assert exact_graphs(manager.stats()) == ([] if upfront else [42])
    assert len(manager.stats().graphs) == 2
    assert_equals_eager(manager, [42], 2)


def test_with_capture_up_front_only_capture_call_makes_one(manager_of: Make) -> None:
    manager = manager_of(capture="upfront")
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 3})
    assert not manager.is_captured()
    manager.capture_call(call_for(manager, ABOVE))
    assert manager.is_captured()
    assert_equals_eager(manager, ABOVE, 5)
    assert counts(manager)[0] == 1
    assert_equals_eager(manager, [42], 5)
    assert exact_graphs(manager.stats()) == [40]


def test_capture_call_needs_no_second_sighting_and_is_done_once(manager_of: Make) -> None:
    manager = manager_of()
    encoder: Any = manager.model
    manager.capture_call(call_for(manager, ABOVE))
    captured = encoder.exact_calls
    manager.capture_call(call_for(manager, ABOVE, seed=2))
    assert encoder.exact_calls == captured
    assert_equals_eager(manager, ABOVE, 3)
    assert counts(manager) == (1, {})


def test_capture_call_respects_max_graphs(manager_of: Make) -> None:
    manager = manager_of(max_graphs=1, capture="upfront")
    manager.capture_call(call_for(manager, [40]))
    with pytest.raises(CaptureError, match="max_graphs is reached"):
        manager.capture_call(call_for(manager, [42]))
    assert exact_graphs(manager.stats()) == [40]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wrong, r"its graph differs from eager mode by .* on a probe"),
        (WrongForOthers, r"its graph differs from eager mode by .* on a probe"),
        (Failing, r"no such kernel"),
        (WithoutMemory, r"out of memory"),
    ],
)
def test_capture_call_says_why_there_is_no_graph(
    manager_of: Make, kind: type[ExactEngine], message: str
) -> None:
    manager = manager_of(kind())
    with pytest.raises(CaptureError, match=message):
        manager.capture_call(call_for(manager, ABOVE))
    assert manager.stats().graphs == ()


def test_capture_call_of_what_can_not_be_a_graph_is_an_error(manager_of: Make) -> None:
    class Refuses(ExactEngine):
        def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
            raise Refusal(Reason.DEVICE)

    with pytest.raises(CaptureError, match=r"graph of its own: .* not on the encoder's device"):
        manager_of(Refuses()).capture_call(call_of(ABOVE))


def test_capture_call_wants_the_tower_in_a_mode_that_graphs_can_serve() -> None:
    encoder = tiny_encoder("qwen2_vl:tiny")
    manager = make_manager(encoder, token_budgets=None)
    encoder.tower.module.train()
    with pytest.raises(CaptureError, match="the encoder is in training mode"):
        manager.capture_call(encoder.example_call())
    encoder.tower.module.eval()
    backend = MeasuredBackend()
    backend.is_busy = True
    with pytest.raises(CaptureError, match="traced or captured by somebody else"):
        make_manager(ExactEngine(), backend).capture_call(call_of(ABOVE))
    manager.capture_call(encoder.example_call())  # though gradients are enabled here
    assert len(manager.stats().graphs) == 1


def test_mode_full_never_makes_one(manager_of: Make) -> None:
    manager = manager_of(mode="full")
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 3})
    with pytest.raises(UnsupportedModelError, match="engine has no graphs of exact calls"):
        manager.capture_call(call_for(manager, ABOVE))


def test_mode_piecewise_always_does() -> None:
    backend = MeasuredBackend()
    manager = manager_on("cpu", backend=backend, mode="piecewise")
    for seed in range(3):
        assert_equals_eager(manager, [8, 4], seed)
    assert counts(manager) == (4, {Reason.PIECEWISE: 2})
    assert exact_graphs(manager.stats()) == [12]
    assert backend.captured == []  # no budget


def test_mode_piecewise_needs_an_encoder_that_has_exact_calls() -> None:
    with pytest.raises(ConfigError, match=r"needs exact_call\(\) .* which EngineEncoder doesn't"):
        make_manager(make_encoder(), mode="piecewise")


def test_an_encoder_without_exact_calls_runs_as_before() -> None:
    manager = make_manager(make_encoder())
    for _ in range(3):
        manager.execute(call_for(manager, ABOVE))
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 3})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Wrong, Reason.CAPTURE_FAILED),
        (WrongForOthers, Reason.CAPTURE_FAILED),
        (Failing, Reason.CAPTURE_FAILED),
        (WithoutMemory, Reason.OUT_OF_MEMORY),
    ],
)
def test_a_graph_that_can_not_serve_is_dropped_with_a_reason_and_one_warning(
    manager_of: Make, kind: type[ExactEngine], reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(kind())
    for seed in range(4):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 1, reason: 3})
    assert manager.stats().graphs == ()
    (warning,) = warnings_in(caplog)
    assert warning.startswith("engine runs in eager mode for 40 tokens, one exact call: ")


def test_whatever_goes_wrong_in_a_capture_eager_mode_still_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mmgraph.manager.exact.varied", no_memory)
    manager = manager_on("cpu")
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 1, Reason.OUT_OF_MEMORY: 2})


def test_a_graph_that_is_not_faster_never_serves(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_on("cpu", SlowGraph(clock), TimedBackend())
    for seed in range(4):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (0, {Reason.ABOVE_BUDGET: 1, Reason.NOT_FASTER: 3})
    assert manager.stats().graphs == ()
    assert warnings_in(caplog) == []  # nothing is wrong with it
    with pytest.raises(CaptureError, match=r"its graph takes 1000.00 ms, eager mode 0.00 ms"):
        manager.capture_call(call_for(manager, [42]))


def test_a_faster_graph_serves(clock: Clock) -> None:
    manager = manager_on("cpu", SlowEager(clock), TimedBackend())
    for seed in range(3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (2, {Reason.ABOVE_BUDGET: 1})


def test_sizes_that_depend_on_contents_end_a_graph(
    manager_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(DropsRows())
    for seed in (1, 1, 1):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (2, {Reason.ABOVE_BUDGET: 1})
    for seed in (2, 1, 3):
        assert_equals_eager(manager, ABOVE, seed)
    assert counts(manager) == (2, {Reason.ABOVE_BUDGET: 1, Reason.DATA_DEPENDENT: 3})
    assert manager.stats().graphs == ()
    (warning,) = warnings_in(caplog)
    assert "KeepsAgreeing.forward returned" in warning


def test_a_tower_that_writes_to_its_inputs_does_so_once_a_call(manager_of: Make) -> None:
    """Probes run on copies: else the patches of the second call would be scaled several times."""
    manager = manager_of(WritesToItsInputs())
    for seed in range(3):
        call = call_for(manager, ABOVE, seed=seed)
        expected = (
            ExactEngine()
            .to(manager.device)
            .embed_multimodal(**{**call, "patches": call["patches"] * 2})
        )
        torch.testing.assert_close(manager.execute(call), expected, rtol=1e-5, atol=1e-5)
    assert counts(manager) == (2, {Reason.ABOVE_BUDGET: 1})


def test_outputs_belong_to_the_caller(manager_of: Make) -> None:
    manager = manager_of()
    kept = []
    for seed in range(1, 5):
        (output,) = manager.execute(call_for(manager, ABOVE, seed=seed))
        kept.append((output, output.clone()))
        manager.execute(call_for(manager, [42], seed=seed))
    for output, copy in kept:
        assert torch.equal(output, copy)
        output.fill_(float("nan"))
    assert_equals_eager(manager, ABOVE, 1)


def test_threads_get_their_own_results(manager_of: Make) -> None:
    """With so little room that they also capture, replay and evict at once."""
    manager = manager_of(max_graphs=2)
    encoder: Any = manager.model
    sizes = [[40], [42], [36, 8], [40]]
    calls = [[call_for(manager, s, seed=10 * t + i) for i, s in enumerate(sizes)] for t in range(2)]
    expected = [[encoder.embed_multimodal(**call) for call in part] for part in calls]
    start, failures = threading.Barrier(2), list[str]()

    def work(thread: int) -> None:
        start.wait()
        for call, items in zip(calls[thread] * 4, expected[thread] * 4, strict=True):
            try:
                for output, item in zip(manager.execute(call), items, strict=True):
                    torch.testing.assert_close(output, item, rtol=1e-4, atol=1e-4)
            except Exception as error:
                failures.append(f"{call['lengths'].tolist()}: {error}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = manager.stats()
    assert (stats.calls, stats.items) == (2 * 4 * 4, 2 * 4 * 5)
    assert stats.hits > 0
    assert len(stats.graphs) <= 2


def test_gradients_and_inference_mode_are_as_in_other_graphs(manager_of: Make) -> None:
    manager = manager_of()
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_equals_eager(manager, ABOVE, 1)
    (output,) = manager.execute(call_for(manager, ABOVE))
    assert not output.requires_grad
    assert not output.is_inference()
    assert counts(manager) == (4, {Reason.ABOVE_BUDGET: 1})


def test_somebody_elses_capture_is_left_alone() -> None:
    class Unreadable(ExactEngine):
        def item_specs(self, mm_kwargs: Mapping[str, Any]) -> Any:
            raise Refusal(Reason.UNSUPPORTED_CALL)

    backend = MeasuredBackend()
    manager = manager_on("cpu", Unreadable(), backend)
    for busy in (False, False, True, False):
        backend.is_busy = busy
        assert_equals_eager(manager, ABOVE, 1)
    assert counts(manager) == (2, {Reason.UNSUPPORTED_CALL: 2})


def test_statistics_memory_and_clear_include_exact_graphs(manager_of: Make) -> None:
    manager = manager_of()
    for seed in range(3):
        assert_equals_eager(manager, [8], seed)
        assert_equals_eager(manager, ABOVE, seed)
    stats = manager.stats()
    (graph,) = [graph for graph in stats.graphs if graph.key.exact is not None]
    assert graph.replays == 2
    assert graph.num_bytes >= call_of(ABOVE)["patches"].nbytes  # its buffers, at least
    assert graph.capture_seconds > 0
    assert manager.memory_by_graph()[graph.key] == graph.num_bytes
    assert (stats.tokens, stats.padding) == (3 * 8 + 2 * 40, 0)
    assert str(graph.key) == "40 tokens, one exact call"
    assert manager._exact is not None
    (entry,) = manager._exact.entries.values()
    manager.clear()
    assert manager.stats().graphs == ()
    assert entry.graph._steps == []
    assert_equals_eager(manager, ABOVE, 4)  # as if it were new
    assert manager.stats().graphs == ()
    assert_equals_eager(manager, ABOVE, 5)
    assert [graph.replays for graph in manager.stats().graphs] == [1]


def test_replays_of_graphs_that_are_gone_are_forgotten(manager_of: Make) -> None:
    manager = manager_of(max_graphs=1)
    for lengths in ([40], [42], [44], [46]):
        for seed in range(2):
            assert_equals_eager(manager, lengths, seed)
    assert len(manager._stats._replays) == 1


def test_the_report_of_a_handle_names_exact_graphs_and_detach_frees_them() -> None:
    tower = load_recipe("qwen2_vl:tiny").build_encoder()
    encoder = tiny_encoder("qwen2_vl:tiny")
    config = GraphConfig(token_budgets=(4,), max_items=1)
    handle = attach(tower, config)
    with torch.no_grad():
        for _ in range(3):
            tower(**encoder.example_call())
    assert "64 tokens, one exact call: 2 replays" in handle.report()
    assert handle.stats().hits == 2
    handle.clear()
    assert handle.stats().graphs == ()
    with torch.no_grad():
        for _ in range(2):
            tower(**encoder.example_call())
    assert len(handle.stats().graphs) == 1
    (manager,) = (method.manager for method in handle._methods)
    assert manager is not None
    handle.detach()
    assert manager.stats().graphs == ()
    assert "forward" not in tower.__dict__


class Takes(nn.Module):
    """A signature; nothing is computed."""

    def forward(
        self,
        pixels: torch.Tensor,
        sizes: torch.Tensor | None = None,
        *,
        layers: Any = None,
        flavour: str = "plain",
        **more: Any,
    ) -> None: ...


def taken_apart(**mm_kwargs: Any) -> ExactCall:
    return exact_call(
        {"pixels": torch.zeros(4, 3), **mm_kwargs}, TowerSignature(Takes.forward), CPU, (), 4
    )


def refusal_of(**mm_kwargs: Any) -> Reason:
    with pytest.raises(Refusal) as caught:
        taken_apart(**mm_kwargs)
    return caught.value.reason


def test_floats_are_contents_and_small_whole_numbers_belong_to_the_key() -> None:
    sizes, mask = torch.tensor([[2, 2]]), torch.tensor([True, False])
    call = taken_apart(sizes=sizes, mask=mask, scores=torch.ones(2))
    assert sorted(call.contents) == ["pixels", "scores"]
    assert sorted(call.others) == ["mask", "sizes"]
    same = {"sizes": sizes.clone(), "mask": mask.clone(), "scores": torch.zeros(2)}
    assert taken_apart(**same).key == call.key
    for other in (
        {**same, "sizes": torch.tensor([[2, 3]])},
        {**same, "sizes": sizes.int()},
        {**same, "sizes": sizes.flatten()},
        {**same, "mask": torch.tensor([False, True])},
        {**same, "mask": mask.to(torch.uint8)},
        {**same, "scores": torch.ones(3)},
        {**same, "scores": torch.ones(2).double()},
        {**same, "pixels": torch.zeros(4, 3).half()},
    ):
        assert taken_apart(**other).key != call.key


def test_large_tensors_of_whole_numbers_are_contents() -> None:
    """The mask of 64 clips of 30 s, in frames of 10 ms, isn't large yet."""
    small, large = torch.ones(64, 3000).int(), torch.zeros((1 << 20) + 1).int()
    call = taken_apart(sizes=small, mask=large)
    assert sorted(call.contents) == ["mask", "pixels"]
    assert taken_apart(sizes=small, mask=large + 1).key == call.key
    assert taken_apart(sizes=small + 1, mask=large).key != call.key


def test_a_main_input_of_whole_numbers_is_contents_earlier() -> None:
    pixels = torch.zeros(3, 224, 224, dtype=torch.uint8)
    assert list(taken_apart(pixels=pixels).contents) == ["pixels"]


def test_a_tensor_that_is_a_view_counts_as_what_it_holds() -> None:
    numbers = torch.arange(6).reshape(2, 3)
    assert taken_apart(sizes=numbers.t()).key == taken_apart(sizes=numbers.t().contiguous()).key
    assert taken_apart(sizes=numbers[1]).key != taken_apart(sizes=numbers[0]).key


def test_plain_arguments_belong_to_the_key_unless_they_are_defaults() -> None:
    plain = taken_apart()
    assert taken_apart(sizes=None, layers=None, flavour="plain").key == plain.key
    keys = [
        taken_apart(layers=layers).key
        for layers in ([1, 2], (1, 2), [1, 2.0], [2, 1], [True, 2], 1, "1", torch.float16)
    ]
    assert len({plain.key, *keys}) == 1 + len(keys)
    assert taken_apart(layers=[1, 2]).key == keys[0]
    assert taken_apart(layers=[1, 2]).others == {"layers": [1, 2]}
    assert taken_apart(flavour="other").key != plain.key


def test_what_no_graph_can_take_is_refused() -> None:
    assert refusal_of(layers=object()) is Reason.UNSUPPORTED_CALL
    assert refusal_of(layers=[torch.ones(2)]) is Reason.UNSUPPORTED_CALL
    assert refusal_of(pixels=None) is Reason.UNSUPPORTED_CALL
    assert refusal_of(pixels=[torch.ones(2)], scores=torch.ones(2)) is Reason.UNSUPPORTED_CALL
    assert refusal_of(pixels=torch.ones(2).int()) is Reason.UNSUPPORTED_CALL
    assert refusal_of(pixels=torch.ones(2, device="meta")) is Reason.DEVICE
    assert refusal_of(scores=torch.ones(2, device="meta")) is Reason.DEVICE


def test_contents_that_want_gradients_are_refused_where_there_are_any() -> None:
    wanted = torch.ones(2, requires_grad=True)
    assert refusal_of(scores=wanted) is Reason.GRAD
    with torch.no_grad():
        assert "scores" in taken_apart(scores=wanted).contents


@torch.no_grad()
def test_a_grid_that_its_owner_changes_later_changes_no_answer() -> None:
    encoder = tiny_encoder("qwen2_vl:tiny")
    manager = make_manager(encoder, token_budgets=None, mode="piecewise")
    call = encoder.example_call()
    grid = call["grid_thw"]
    for _ in range(2):
        manager.run(call)
    assert manager.stats().hits == 1
    before = grid.clone()
    grid.copy_(torch.tensor([[1, 4, 16]]))
    again = {**encoder.example_call(), "grid_thw": before}
    expected = encoder.embed_multimodal(**again).pooler_output
    torch.testing.assert_close(manager.run(again).pooler_output, expected, rtol=1e-4, atol=1e-4)
    assert manager.stats().hits == 2
    expected = encoder.embed_multimodal(**{**again, "grid_thw": grid}).pooler_output
    output = manager.run({**again, "grid_thw": grid}).pooler_output
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert manager.stats().misses == {Reason.PIECEWISE: 2}


def test_the_second_contents_are_of_the_other_sign_and_places_stay_in_range() -> None:
    patches = torch.cat([torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]), torch.rand(3, 4)], 1)
    patches[:, 2:] += 0.1
    others = varied(patches)
    assert bool((others[:, 2:] < 0).all())
    assert torch.equal(others[:, :2], patches[:, :2].flip(0))
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert torch.equal(varied(mask), mask.flip(0))
    numbers = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(varied(numbers), numbers.flip(0))
    assert varied(torch.tensor(0.5)) < 0
