"""The manager with an encoder of an engine's author: budgets, capture, execute, statistics."""

from __future__ import annotations

import gc
import json
import logging
import re
import threading
import weakref
from typing import Any

import pytest
import torch

from mmgraph import (
    CaptureError,
    ConfigError,
    EncoderBatch,
    EncoderCudaGraphManager,
    GraphConfig,
    GraphKey,
    Reason,
    Refusal,
    ReplayError,
    UnsupportedModelError,
)
from mmgraph.encoders import encoder_for, find_towers
from mmgraph.policy import ladder
from mmgraph.recipes import load_recipe
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
)

CPU = torch.device("cpu")
BUDGETS = (8, 16, 32)


def make_manager(
    encoder: Any = None, backend: MeasuredBackend | None = None, **config: Any
) -> EncoderCudaGraphManager:
    config = {"token_budgets": BUDGETS, **config}
    encoder = make_encoder() if encoder is None else encoder
    return EncoderCudaGraphManager(
        GraphConfig(**config), CPU, torch.float32, encoder, backend=backend
    )


def tiny(name: str) -> Any:
    (tower,) = find_towers(load_recipe(name).build_encoder(device="meta"))
    return encoder_for(tower)


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, (1, 2, 4, 8, 16, 32)),  # the default
        ({"row_budgets": (1, 3)}, (1, 3)),  # named
        ({"token_budgets": (16, 40, 100)}, (1, 2, 6)),  # tokens, rounded down to whole rows
        ({"token_budgets": (15, 16, 17, 31)}, (1,)),  # too small and equal ones fall out
        ({"token_budgets": (16,), "row_budgets": (2,)}, (2,)),  # rows are the more exact word
    ],
)
def test_budgets_of_rows_are_whole_rows(config: dict[str, Any], rows: tuple[int, ...]) -> None:
    config = {"token_budgets": None, **config}
    manager = make_manager(tiny("vit:tiny"), **config)
    assert manager.budgets == tuple(16 * n for n in rows)


def test_budgets_that_hold_no_row_are_an_error() -> None:
    message = (
        "no token budget holds one row of ViTModel, which has 16 tokens: raise token_budgets, or "
        "set row_budgets"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make_manager(tiny("vit:tiny"), token_budgets=(8, 15))


def test_budgets_of_a_packed_encoder_are_inferred_from_its_sizes() -> None:
    encoder = make_encoder(min_tokens=6, max_tokens=1000)
    manager = make_manager(encoder, token_budgets=None, row_budgets=(1, 2))
    assert manager.budgets == ladder(6, 1000, 16, 2)
    assert manager.budgets[-1] == 1000


def test_budgets_that_split_a_merge_group_are_an_error() -> None:
    message = (
        "token budgets of Qwen2VisionTransformerPretrainedModel must be multiples of 4 (its "
        "spatial merge), got 66: use 68"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_manager(tiny("qwen2_vl:tiny"), token_budgets=(64, 66, 70))


def test_a_model_without_the_protocol_is_an_error() -> None:
    message = (
        "Linear doesn't implement SupportsEncoderCudaGraph: implement its methods, or use "
        "mmgraph.attach() for a model of transformers or timm"
    )
    with pytest.raises(UnsupportedModelError, match=f"^{re.escape(message)}$"):
        make_manager(torch.nn.Linear(2, 2))


def test_graphs_of_cuda_can_not_serve_an_encoder_on_the_cpu() -> None:
    config = GraphConfig(backend="cuda")
    with pytest.raises(ConfigError, match="needs an encoder on a CUDA device, got one on cpu"):
        EncoderCudaGraphManager(config, CPU, torch.float32, make_encoder())


def test_a_manager_serves_the_modalities_of_its_encoder() -> None:
    manager = make_manager()
    assert [manager.supports_modality(m) for m in ("image", "video", "audio")] == [
        True,
        True,
        False,
    ]


# ---------------------------------------------------------------- capture


def test_capture_records_every_budget_largest_first_and_returns_its_bytes() -> None:
    backend, seen = MeasuredBackend(), list[GraphKey]()
    manager = make_manager(backend=backend, max_items=4)
    keys = manager.keys_to_capture()
    assert manager.capture(progress=seen.append) == 1024 * len(keys)
    assert seen == keys
    assert [key.token_budget for key in keys] == sorted(
        [key.token_budget for key in keys], reverse=True
    )
    assert {key.token_budget for key in keys} == set(BUDGETS)
    assert backend.captured == [key.token_budget for key in keys]
    assert manager.memory_by_graph() == dict.fromkeys(keys, 1024)
    assert {key.segment_capacity for key in keys} == {(1,), (4,)}


def test_capture_again_does_nothing() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.capture()
    graphs, captured = manager.stats().graphs, list(backend.captured)
    seen = list[GraphKey]()
    assert manager.keys_to_capture() == []
    assert manager.capture(progress=seen.append) == 0
    assert (seen, backend.captured) == ([], captured)
    assert manager.stats().graphs == graphs


def test_capture_hands_the_pool_on() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.capture((0, 7))
    assert backend.pools == [(0, 7)]


def test_capture_leaves_the_collector_and_the_random_numbers_as_they_were() -> None:
    state = torch.get_rng_state()
    make_manager().capture()
    assert torch.equal(torch.get_rng_state(), state)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_what_was_captured_up_front_serves_every_call_that_it_fits() -> None:
    manager = make_manager(capture="upfront", max_items=4)
    assert not manager.is_captured()
    manager.capture()
    assert manager.is_captured()
    graphs = len(manager.stats().graphs)
    for lengths in ([2], [8], [32], [2, 2, 2], [10, 6, 4, 2], [30, 2], [32, 16, 8]):
        assert_items_equal(manager.execute(call_of(lengths)), manager.model, call_of(lengths))
    stats = manager.stats()
    assert stats.misses == {}
    assert len(stats.graphs) == graphs


def test_nothing_is_captured_on_use_in_up_front_mode() -> None:
    manager = make_manager(capture="upfront")
    call = call_of([4, 8])
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 2}
    assert manager.stats().graphs == ()


def test_more_items_than_were_captured_for_run_in_eager_mode() -> None:
    manager = make_manager(capture="upfront", max_items=2)
    manager.capture()
    call = call_of([2] * 4)
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 4}


def test_a_graph_is_captured_when_a_call_first_needs_it() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    assert manager.is_captured()
    assert backend.captured == []
    for lengths in ([4], [6], [30], [4], [28]):
        manager.execute(call_of(lengths))
    assert backend.captured == [8, 8, 32]  # seqlen tiers 4 and 8, then the largest
    assert manager.stats().hits == 5


def test_a_looser_graph_of_the_same_budget_is_used_instead_of_a_capture() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    manager.execute(call_of([8]))
    manager.execute(call_of([6]))  # the same tiers
    manager.execute(call_of([4]))  # half the bound on lengths
    assert backend.captured == [8]
    assert manager.stats().hits == 3


def test_max_graphs_sends_other_sizes_to_eager_mode() -> None:
    manager = make_manager(max_graphs=1)
    small, large = call_of([8]), call_of([30, 6])
    for call in (small, large, small):
        assert_items_equal(manager.execute(call), manager.model, call)
    stats = manager.stats()
    assert len(stats.graphs) == 1
    assert stats.hits == 2 + 1  # the small one twice, and the item that its graph holds
    assert stats.misses == {Reason.GRAPH_LIMIT: 1}


def test_max_graphs_ends_a_capture_up_front() -> None:
    manager = make_manager(capture="upfront", max_graphs=2)
    manager.capture()
    budgets = [graph.key.token_budget for graph in manager.stats().graphs]
    assert budgets == [32, 32]
    manager.capture()
    assert len(manager.stats().graphs) == 2


def test_capture_logs_how_many_graphs_there_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmgraph")
    make_manager(max_graphs=2).capture()
    assert caplog.messages[-1].startswith("engine: 2 graphs captured")


def test_a_failed_capture_is_counted_warned_about_once_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder, backend = make_encoder(), MeasuredBackend()
    encoder.fails_above = 8
    manager = make_manager(encoder, backend)
    calls = [call_of(lengths) for lengths in ([16], [32], [16, 6], [8])]
    for call in calls:
        assert_items_equal(manager.execute(call), encoder, call)
    attempts = list(backend.captured)
    assert attempts == [16, 32, 32, 8]  # two tables of segments for 32 tokens
    for call in calls:
        assert_items_equal(manager.execute(call), encoder, call)
    assert backend.captured == attempts
    stats = manager.stats()
    assert stats.hits == 2
    assert stats.misses == {Reason.CAPTURE_FAILED: 8}
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("engine runs in eager mode for 16 tokens, segments <= 1")
    assert "ValueError: no kernel for 16 tokens" in warnings[0]


def test_a_budget_that_fails_leaves_the_others_captured() -> None:
    encoder = make_encoder()
    encoder.fails_above = 16
    manager = make_manager(encoder, MeasuredBackend(), capture="upfront", max_items=1)
    with pytest.raises(CaptureError, match="no kernel for 32 tokens"):
        manager.capture()  # the largest comes first: there is nothing yet
    assert not manager.is_captured()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    manager = make_manager(encoder, MeasuredBackend(), max_items=1)
    manager.execute(call_of([8]))
    assert manager.capture() == 1024
    assert {graph.key.token_budget for graph in manager.stats().graphs} == {8, 16}


def test_a_larger_graph_serves_what_can_not_be_captured() -> None:
    encoder = make_encoder()
    encoder.fails_at = 16
    manager = make_manager(encoder)
    for lengths in ([16], [32], [16]):
        call = call_of(lengths)
        assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
    assert manager.stats().hits == 2


def test_capture_tries_again_what_had_failed() -> None:
    encoder = make_encoder()
    encoder.fails_above = 16
    manager = make_manager(encoder, MeasuredBackend(), max_items=1)
    call = call_of([30])
    manager.execute(call)
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
    encoder.fails_above = None
    manager.capture()
    assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().hits == 1


# ---------------------------------------------------------------- execute


@pytest.mark.parametrize(
    "lengths",
    [
        [8],  # exact
        [6],  # padded
        [2, 4, 2],  # several in one graph
        [2] * 13,  # many small ones
        [32, 16, 8],  # several replays
        [4, 30, 6, 20, 2],  # of mixed sizes
        [34],  # above every budget
        [4, 34, 6],  # above among others
        [40, 4, 34, 30, 2, 50],
    ],
)
def test_execute_returns_one_tensor_an_item_in_the_order_of_the_call(lengths: list[int]) -> None:
    manager = make_manager()
    encoder: Any = manager.model
    for seed in (1, 2):  # a second time from the cached plan
        call = call_of(lengths, seed)
        assert_items_equal(manager.execute(call), encoder, call)
    oversized = [n for n in lengths if n > 32]
    assert encoder.eager_calls == ([oversized] * 2 if oversized else [])
    stats = manager.stats()
    assert stats.calls == 2
    assert stats.items == 2 * len(lengths)
    assert stats.misses.get(Reason.ABOVE_BUDGET, 0) == 2 * len(oversized)
    assert stats.tokens == 2 * (sum(lengths) - sum(oversized))
    assert stats.tokens + stats.padding == sum(g.replays * g.key.token_budget for g in stats.graphs)


def test_history_does_not_matter() -> None:
    manager = make_manager()
    first = manager.execute(call_of([4, 2]))
    for lengths in ([32], [2] * 10, [16, 6], [34, 4]):
        manager.execute(call_of(lengths, seed=3))
    again = manager.execute(call_of([4, 2]))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def test_outputs_are_not_touched_by_later_calls() -> None:
    manager = make_manager()
    kept = manager.execute(call_of([4, 2])), manager.run(call_of([8]))
    copies = [t.clone() for t in (*kept[0], kept[1])]
    for seed in range(3):
        for later in manager.execute(call_of([4, 2], seed)):
            later.fill_(float("nan"))
        manager.run(call_of([8], seed)).fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip((*kept[0], kept[1]), copies, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_outputs_are_plain_tensors_in_every_mode(mode: type) -> None:
    manager = make_manager()
    with mode():
        (output,) = manager.execute(call_of([4]))
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)
    with torch.inference_mode():
        manager.execute(call_of([4]))
    (output,) = manager.execute(call_of([4]))
    assert not output.is_inference()
    output.add_(1)


def test_another_constant_is_another_graph() -> None:
    manager = make_manager()
    plain, scaled = call_of([8]), call_of([8], scale=3.0)
    for call in (plain, scaled, plain):
        assert_items_equal(manager.execute(call), manager.model, call)
    assert len(manager.stats().graphs) == 2
    assert manager.stats().hits == 3


def test_no_items_run_in_eager_mode_and_count_as_none() -> None:
    manager = make_manager()
    assert manager.execute(call_of([])) == []
    stats = manager.stats()
    assert (stats.calls, stats.items, stats.misses) == (1, 0, {})
    assert manager.model.eager_calls == [[]]


def test_an_encoder_need_not_refuse_a_call_without_items() -> None:
    class Permissive(EngineEncoder):
        def item_specs(self, mm_kwargs: Any) -> EncoderBatch:
            return super().item_specs(mm_kwargs) if len(mm_kwargs["lengths"]) else EncoderBatch(())

    manager = make_manager(Permissive())
    assert manager.execute(call_of([])) == []
    assert manager.stats().items == 0


def test_a_refused_call_is_counted_and_runs_in_eager_mode() -> None:
    class Refusing(EngineEncoder):
        def item_specs(self, mm_kwargs: Any) -> EncoderBatch:
            raise Refusal(Reason.DTYPE, super().item_specs(mm_kwargs))

    encoder = Refusing()
    manager = make_manager(encoder)
    call = call_of([4, 2])
    with torch.no_grad():
        assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().misses == {Reason.DTYPE: 2}


def test_while_somebody_else_captures_calls_run_in_eager_mode() -> None:
    backend, call = MeasuredBackend(), call_of([4, 2])
    manager = make_manager(backend=backend)
    backend.is_busy = True
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().misses == {Reason.COMPILING: 2}
    assert backend.captured == []
    backend.is_busy = False
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().hits == 2


def test_no_part_of_a_replayed_call_has_gradients() -> None:
    manager = make_manager(make_encoder().requires_grad_(True))
    with torch.enable_grad():
        outputs = manager.execute(call_of([4, 34, 6]))
    assert not any(output.requires_grad for output in outputs)
    assert manager.stats().hits == 2


def test_refuse_counts_the_items_under_the_reason_given() -> None:
    manager = make_manager()
    call = call_of([4, 2])
    assert_items_equal(manager.refuse(call, Reason.TRAINING), manager.model, call)
    manager.refuse(call_of([]), Reason.TRAINING)
    assert manager.stats().misses == {Reason.TRAINING: 2}
    assert manager.stats().calls == 2


class TwoOutputs(EngineEncoder):
    """Returns features of another layer besides, which only graphs hand on."""

    def encoder_forward(self, buffers: Any, key: GraphKey) -> Any:
        output = super().encoder_forward(buffers, key)
        return output, output * 2


@torch.no_grad()
def test_the_first_of_several_outputs_is_given_by_item() -> None:
    manager = make_manager(TwoOutputs())
    call = call_of([4, 6])
    assert_items_equal(manager.execute(call), manager.model, call)


@torch.no_grad()
def test_the_first_of_several_outputs_is_given_by_item_where_some_run_in_eager_mode() -> None:
    manager = make_manager(TwoOutputs())
    call = call_of([4, 34])
    assert_items_equal(manager.execute(call), manager.model, call)


def test_run_returns_what_the_encoder_itself_returns() -> None:
    encoder = tiny_packed()
    manager = make_manager(encoder, token_budgets=(64,))
    call = encoder.example_call()
    with torch.no_grad():
        eager, output = encoder.embed_multimodal(**call), manager.run(call)
        items = manager.execute(call)
    assert manager.stats().hits == 2
    assert type(output) is type(eager)
    torch.testing.assert_close(output.pooler_output, eager.pooler_output, rtol=1e-4, atol=1e-4)
    assert [t.shape for t in items] == [eager.last_hidden_state.shape]
    assert torch.equal(items[0], output.last_hidden_state)


def tiny_packed() -> Any:
    (tower,) = find_towers(load_recipe("qwen2_vl:tiny").build_encoder())
    return encoder_for(tower)


@pytest.mark.parametrize("lengths", [[4], [4, 34]])
def test_an_error_of_the_encoder_reaches_the_caller_and_the_next_call_works(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager()
    call = call_of(lengths)
    with monkeypatch.context() as patch:
        patch.setattr(manager.model, "replay_inputs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.execute(call)
    assert_items_equal(manager.execute(call), manager.model, call)


# ---------------------------------------------------------------- clear, plans, debugging


def test_clear_frees_the_graphs_and_calls_capture_anew() -> None:
    backend = MeasuredBackend()
    manager = make_manager(backend=backend)
    call = call_of([4, 20])
    manager.execute(call)
    graphs = list(backend.graphs)
    (arena,) = map(weakref.ref, manager._arenas.values())
    manager.clear()
    manager.clear()
    gc.collect()
    assert arena() is None
    assert manager.stats().graphs == ()
    assert manager.memory_by_graph() == {}
    for graph in graphs:
        with pytest.raises(AssertionError, match="closed"):
            graph.replay()
    assert manager.is_captured()
    assert_items_equal(manager.execute(call), manager.model, call)
    assert manager.stats().hits == 4
    assert manager.stats().replays == len(backend.graphs) - len(graphs)


def test_clear_ends_serving_in_up_front_mode_until_the_next_capture() -> None:
    manager = make_manager(capture="upfront")
    manager.capture()
    manager.clear()
    assert not manager.is_captured()
    manager.execute(call_of([4]))
    assert manager.stats().misses == {Reason.NOT_CAPTURED: 1}
    manager.capture()
    manager.execute(call_of([4]))
    assert manager.stats().hits == 1


def count_plans(manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    planned, plan = list[int](), manager._planner.plan

    def counting(batch: EncoderBatch, graphs: Any) -> Any:
        planned.append(len(batch.items))
        return plan(batch, graphs)

    monkeypatch.setattr(manager._planner, "plan", counting)
    return planned


def test_a_call_of_known_sizes_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    manager.execute(call_of([4, 2]))
    planned = count_plans(manager, monkeypatch)
    manager.execute(call_of([4, 2], seed=2))
    assert planned == []
    manager.execute(call_of([2, 4]))  # another order is another plan
    assert planned == [2]


def test_a_new_graph_makes_old_plans_invalid() -> None:
    manager = make_manager(capture="upfront", max_items=1)
    call = call_of([4])
    manager.execute(call)
    manager.capture()
    manager.execute(call)
    assert (manager.stats().hits, manager.stats().misses) == (1, {Reason.NOT_CAPTURED: 1})


def test_the_cache_of_plans_is_bounded() -> None:
    class Idle(EngineEncoder):
        def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
            return []

    manager = make_manager(Idle(), capture="upfront")
    for count in range(1, 300):
        manager.execute(call_of([2] * count))
    assert manager.stats().calls == 299
    assert len(manager._plans) <= 256


@pytest.mark.parametrize("debug", [False, True])
def test_debugging_finds_a_buffer_that_moved(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMGRAPH_DEBUG", str(int(debug)))
    manager = make_manager()
    manager.execute(call_of([4]))
    manager.execute(call_of([4]))
    (entry,) = manager._entries.values()
    entry.buffers.views["ends"] = entry.buffers.views["ends"].clone()
    if not debug:
        manager.execute(call_of([4]))  # unseen
        return
    with pytest.raises(ReplayError, match="the static buffer 'ends' was captured at"):
        manager.execute(call_of([4]))


def test_buffers_are_allocated_once_for_all_budgets() -> None:
    manager = make_manager()
    for lengths in ([4], [32], [2] * 12, [16]):
        manager.execute(call_of(lengths))
    (arena,) = manager._arenas.values()
    assert arena.storage["patches"].shape[0] == BUDGETS[-1]
    for entry in manager._entries.values():
        for name, view in entry.buffers.views.items():
            assert view.data_ptr() == arena.storage[name].data_ptr()


def test_statistics_are_json() -> None:
    manager = make_manager(backend=MeasuredBackend())
    manager.execute(call_of([4, 34]))
    data = json.loads(json.dumps(manager.stats().to_dict()))
    assert (data["items"], data["hits"], data["misses"]) == (2, 1, {"ABOVE_BUDGET": 1})
    assert data["graphs"][0]["bytes"] == 1024


# ---------------------------------------------------------------- threads


def test_threads_get_their_own_results() -> None:
    manager = make_manager(max_graphs=3)  # so that calls also capture and fall back at once
    encoder: Any = manager.model
    sizes = [[4], [8, 2], [30], [34, 4], [2] * 7, [16, 16]]
    calls = [[call_of(s, seed=10 * t + i) for i, s in enumerate(sizes)] for t in range(2)]
    expected = [[encoder.embed_multimodal(**call) for call in part] for part in calls]
    start, failures = threading.Barrier(2), list[str]()

    def work(thread: int) -> None:
        start.wait()
        for _ in range(5):
            for call, items in zip(calls[thread], expected[thread], strict=True):
                try:
                    for output, item in zip(manager.execute(call), items, strict=True):
                        torch.testing.assert_close(output, item, rtol=1e-5, atol=1e-5)
                except Exception as error:
                    failures.append(f"{call['lengths'].tolist()}: {error}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = manager.stats()
    assert stats.calls == 2 * 5 * len(sizes)
    assert stats.items == 2 * 5 * sum(map(len, sizes))


def test_threads_that_run_a_tower_get_their_own_results() -> None:
    encoder = tiny_packed()
    manager = make_manager(encoder, token_budgets=(64, 256))
    calls = [encoder.example_call() for _ in range(4)]
    with torch.no_grad():
        expected = [encoder.embed_multimodal(**call).pooler_output for call in calls]
    failures, start = list[str](), threading.Barrier(2)

    @torch.no_grad()
    def work(thread: int) -> None:
        start.wait()
        for i in (thread, thread + 2) * 5:
            output = manager.run(calls[i]).pooler_output
            if not torch.allclose(output, expected[i], rtol=1e-4, atol=1e-4):
                failures.append(f"call {i}")

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.stats().hits == 20
