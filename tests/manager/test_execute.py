"""Calls: one tensor an item in the order of the call, whatever way each of them goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph import EncoderBatch, GraphKey, Reason, Refusal
from tests.manager.engine import (
    EngineEncoder,
    MeasuredBackend,
    assert_items_equal,
    call_of,
    make_encoder,
    make_manager,
    tiny_encoder,
)


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


def test_all_parts_of_a_call_have_gradients_or_none_has() -> None:
    manager = make_manager(make_encoder().requires_grad_(True))
    with torch.enable_grad():
        outputs = manager.execute(call_of([4, 34, 6]))
    assert all(output.requires_grad for output in outputs)
    assert manager.stats().misses == {Reason.GRAD: 3}
    with torch.no_grad():
        outputs = manager.execute(call_of([4, 34, 6]))
    assert not any(output.requires_grad for output in outputs)
    assert manager.stats().hits == 2


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
    encoder = tiny_encoder("qwen2_vl:tiny")
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
