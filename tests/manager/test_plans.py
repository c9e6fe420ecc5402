"""A batch that comes again and again gets a graph of exactly its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mmgraph import (
    BufferSpec,
    CaptureError,
    ConfigError,
    EncoderCudaGraphManager,
    GraphConfig,
    GraphKey,
    Reason,
)
from mmgraph.manager.store import GraphStore
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_manager,
)


def serve(manager: EncoderCudaGraphManager, lengths: list[int], times: int) -> None:
    """Each time with other contents, and each time right."""
    encoder: Any = manager.model
    for seed in range(times):
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), encoder, call)


def budgets(manager: EncoderCudaGraphManager) -> dict[int, int]:
    """Replays by budget."""
    return {g.key.token_budget: g.replays for g in manager.stats().graphs}


@pytest.mark.parametrize(
    ("lengths", "before"),
    [([18], {32: 7}), ([10], {16: 7}), ([10, 8], {32: 7}), ([6, 4, 12], {32: 7})],
)
def test_its_size_is_captured_the_eighth_time(lengths: list[int], before: dict[int, int]) -> None:
    manager = make_manager()
    serve(manager, lengths, 7)
    assert budgets(manager) == before
    padding = manager.stats().padding
    serve(manager, lengths, 5)
    assert budgets(manager) == {**before, sum(lengths): 5}
    assert manager.stats().padding == padding
    serve(manager, [2], 1)  # a capture makes plans anew; the graph is the cheapest from the start
    serve(manager, lengths, 8)
    assert budgets(manager)[sum(lengths)] == 5 + 8


def test_captures_of_others_in_between_do_not_start_the_count_anew() -> None:
    manager = make_manager()
    serve(manager, [18], 4)
    serve(manager, [8], 1)  # a capture, after which plans are made anew
    serve(manager, [18], 3)
    assert 18 not in budgets(manager)
    serve(manager, [16], 1)
    serve(manager, [18], 1)
    assert budgets(manager)[18] == 1


def test_nor_do_many_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmgraph.manager.known._REMEMBERED", 2)
    monkeypatch.setattr("mmgraph.manager.known._COUNTED", 3)
    manager = make_manager(exact_after=3)
    others = [[2], [4], [6], [8], [2, 2], [2, 4]]
    for lengths in ([18], *others, [18], *others):
        serve(manager, lengths, 1)
    assert 18 not in budgets(manager)
    serve(manager, [18], 1)  # the third time; its count fell out of the last five
    assert 18 not in budgets(manager)
    assert len(manager._plans._known._uses) <= 3
    for lengths in ([2], [4], [18], [2], [4], [18]):
        serve(manager, lengths, 1)
    assert 18 in budgets(manager)
    manager.use_budgets((8, 32))
    assert not manager._plans._known._uses


@pytest.mark.parametrize(
    ("lengths", "config"),
    [
        ([32], {}),  # no padding
        ([16, 16], {}),
        ([18], {"exact_after": 0}),
        ([18], {"max_graphs": 1}),  # half of them are left to budgets
        ([18, 34], {}),  # a part runs in eager mode
        ([32, 18], {}),  # more than the buffers hold
    ],
)
def test_otherwise_budgets_go_on_serving(lengths: list[int], config: dict[str, Any]) -> None:
    manager = make_manager(**config)
    serve(manager, lengths, 12)
    assert set(budgets(manager)) <= {8, 16, 32}


def test_up_front_nothing_is_captured_while_serving() -> None:
    manager = make_manager(capture="upfront")
    manager.capture()
    graphs = set(budgets(manager))
    serve(manager, [18], 12)
    assert set(budgets(manager)) == graphs


class Odd(MeasuredBackend):
    """Can't capture 18 tokens."""

    def capture(self, run: Any, buffers: Any, like: Any = None) -> Any:
        if buffers["patches"].shape[0] == 18:
            raise CaptureError("18 is odd in its way")
        return super().capture(run, buffers, like)


def test_a_size_that_cannot_be_captured_stays_with_its_budget() -> None:
    manager = make_manager(backend=Odd())
    serve(manager, [18], 20)
    assert budgets(manager) == {32: 20}
    assert manager.stats().misses == {}


@pytest.mark.parametrize("faster", [True, False])
def test_only_what_is_faster_replaces_a_budget(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    class Timed(MeasuredBackend):
        is_timed = True

    seconds = {32: 2.0, 18: 1.0 if faster else 2.0}
    monkeypatch.setattr(GraphStore, "seconds", lambda _, key: seconds[key.token_budget])
    backend = Timed()
    manager = make_manager(backend=backend)
    serve(manager, [18], 20)
    assert budgets(manager) == ({32: 7, 18: 13} if faster else {32: 20})
    assert backend.captured == [32, 18]
    assert Reason.NOT_FASTER not in manager.stats().misses


class Reversed(EngineEncoder):
    """Has a buffer of indices, of which none may be beyond the budget."""

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        order = torch.arange(key.token_budget).flip(0)
        spec = BufferSpec((key.token_budget,), torch.int64, order)
        return {**super().capture_inputs(key), "order": spec}

    def replay_inputs(self, *call: Any) -> dict[str, Sequence[torch.Tensor]]:
        order = torch.arange(call[-1].token_budget).flip(0)
        return {**super().replay_inputs(*call), "order": [order]}

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        again = buffers["patches"][buffers["order"]][buffers["order"]]
        return super().encoder_forward({**buffers, "patches": again}, key)


def test_each_graph_is_timed_on_buffers_of_its_own() -> None:
    class Timed(MeasuredBackend):
        is_timed = True

    manager = make_manager(Reversed(), Timed(), exact_after=2)
    with torch.no_grad():
        for lengths in ([10], [32], [10], [32], [10]):  # the graph of 16 is timed after that of 32
            manager.execute(call_of(lengths))
    assert set(budgets(manager)) >= {16, 32}
    assert manager.stats().misses == {}


def test_the_number_of_calls_must_be_one() -> None:
    with pytest.raises(ConfigError, match="exact_after must be 0"):
        GraphConfig(exact_after=-1)
    with pytest.raises(ConfigError, match="exact_after must be an integer"):
        GraphConfig(exact_after=True)


def test_outputs_of_both_graphs_are_the_same() -> None:
    manager = make_manager(exact_after=2)
    call = call_of([18])
    first, second = manager.execute(call), manager.execute(call)
    assert budgets(manager) == {32: 1, 18: 1}
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
