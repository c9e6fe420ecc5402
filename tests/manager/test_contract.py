"""What a manager owes the author of an engine, and what it says where he breaks the protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import mmgraph
from mmgraph import (
    BufferSpec,
    CaptureError,
    EncoderBatch,
    EncoderCudaGraphManager,
    EncoderFacts,
    EncoderItemSpec,
    GraphConfig,
    GraphKey,
    Reason,
    ReplayError,
)
from mmgraph.recipes import load_recipe
from tests.manager.engine import CPU, EngineEncoder, call_of, make_manager

WIDTH = 6


class RowsEncoder(nn.Module):
    """The least that an encoder of rows can be; nothing is refused."""

    def __init__(self, fails_above: int = 1 << 30, *, pooled: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, WIDTH)
        self.fails_above = fails_above
        self.pooled = pooled

    def encoder_facts(self) -> EncoderFacts:
        return EncoderFacts(
            name="rows",
            modalities=("image",),
            layout="rows",
            tokens_per_row=2,
            token_granularity=2,
            min_tokens=2,
            max_tokens=16,
            eager_returns="items",
            examples=lambda budget, _: [EncoderBatch((EncoderItemSpec(2),) * (budget // 2), "f32")],
        )

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        return EncoderBatch((EncoderItemSpec(2),) * len(mm_kwargs["pixels"]), "f32")

    def select_items(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        return {"pixels": mm_kwargs["pixels"][list(items)]}

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        return {"pixels": BufferSpec((key.token_budget // 2, 2, 3), torch.float32)}

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Any]:
        return {"pixels": [mm_kwargs["pixels"][i : i + 1] for i in items]}

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        if key.token_budget > self.fails_above:
            raise ValueError("no kernel")
        output: torch.Tensor = self.linear(buffers["pixels"])
        return output.mean(dim=1) if self.pooled else output

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        items = self.linear(mm_kwargs["pixels"])
        return list(items.mean(dim=1, keepdim=True) if self.pooled else items)


def rows_manager(encoder: RowsEncoder | None = None, **config: Any) -> EncoderCudaGraphManager:
    encoder = (encoder or RowsEncoder()).requires_grad_(False)
    settings = GraphConfig(**{"row_budgets": (1, 2, 4), **config})
    return EncoderCudaGraphManager(settings, CPU, torch.float32, encoder)


def rows(count: int) -> dict[str, Any]:
    return {"pixels": torch.randn(count, 2, 3)}


def assert_right(manager: EncoderCudaGraphManager, call: dict[str, Any]) -> None:
    ours, eager = manager.execute(call), manager.model.embed_multimodal(**call)
    assert [x.shape for x in ours] == [x.shape for x in eager]
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("fails_above", [1 << 30, 4, 2, 0])
def test_items_of_rows_have_one_shape_from_graphs_and_from_eager_mode(
    fails_above: int, pooled: bool
) -> None:
    manager = rows_manager(RowsEncoder(fails_above, pooled=pooled), verify_every=1)
    for count in (1, 3, 4, 9, 3):
        assert_right(manager, rows(count))
    assert Reason.DIFFERED not in manager.stats().misses


def test_an_empty_call_is_eager_modes_however_often_it_comes() -> None:
    manager = rows_manager(exact_after=2)
    for _ in range(5):
        assert manager.execute(rows(0)) == []
    stats = manager.stats()
    assert (stats.calls, stats.items, stats.graphs) == (5, 0, ())


@pytest.mark.parametrize("needs", ["weights", "inputs"])
def test_gradients_are_not_lost(needs: str) -> None:
    encoder, call = RowsEncoder(), rows(2)
    manager = rows_manager(encoder)
    if needs == "weights":
        encoder.requires_grad_(True)
    else:
        call["pixels"].requires_grad_()
    assert all(output.requires_grad for output in manager.execute(call))
    assert manager.stats().misses == {Reason.GRAD: 2}
    with torch.no_grad():
        assert_right(manager, call)
    assert manager.stats().hits == 2


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"enforce_eager": True}, Reason.ENFORCE_EAGER),
        ({"cudagraph_mm_encoder": False}, Reason.DISABLED),
    ],
)
def test_a_closed_gate_holds_without_a_state_too(setting: dict[str, Any], reason: Reason) -> None:
    manager = rows_manager(**setting)
    assert manager.capture() == manager.estimate() == 0
    assert not manager.is_captured()
    with manager.capturing():
        assert_right(manager, rows(2))
    assert not manager.is_captured()
    assert (manager.stats().misses, manager.stats().graphs) == ({reason: 2}, ())


PIECES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda p: {"patches": p["patches"]}, r"reads \['ends', 'patches'\], but got \['patches'\]"),
    (lambda p: {**p, "more": p["ends"]}, r"but got \['ends', 'more', 'patches'\]"),
    (lambda p: {**p, "patches": p["patches"][0]}, "must be a sequence of tensors, got one"),
    (lambda p: {**p, "patches": [p["patches"][0][:, :1]]}, r"shape \(8, 1\) .* doesn't fit"),
    (lambda p: {**p, "patches": [*p["patches"], *p["patches"]]}, "from row 8 on doesn't fit"),
]


@pytest.mark.parametrize(("wrong", "message"), PIECES)
def test_pieces_that_break_the_protocol_are_a_clear_error(
    wrong: Callable[[dict[str, Any]], Any], message: str
) -> None:
    class Wrong(EngineEncoder):
        is_wrong = False

        def replay_inputs(self, *arguments: Any) -> Any:
            pieces = super().replay_inputs(*arguments)
            return wrong(pieces) if self.is_wrong else pieces

    encoder = Wrong().requires_grad_(False).eval()
    manager = make_manager(encoder)
    manager.execute(call_of([8]))
    encoder.is_wrong = True
    with pytest.raises(ReplayError, match=message):
        manager.execute(call_of([8]))
    encoder.is_wrong = False
    manager.execute(call_of([8]))
    assert manager.stats().hits == 2


def test_the_last_of_several_blocks_of_capturing_ends_it() -> None:
    manager = rows_manager(capture="upfront")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with manager.capturing():
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=other)
    with manager.capturing():
        thread.start()
        assert entered.wait(20)
    manager.execute(rows(1))  # the other block is still there
    assert len(manager.stats().graphs) == 1
    leave.set()
    thread.join()
    manager.execute(rows(4))
    assert len(manager.stats().graphs) == 1


def test_a_shutdown_in_a_block_of_capturing_is_final() -> None:
    manager = rows_manager()
    with manager.capturing():
        manager.execute(rows(1))
        manager.shutdown()
    with manager.capturing():
        manager.execute(rows(1))
    assert manager.stats().graphs == ()
    assert not manager.is_captured()


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"max_graph_bytes": 1}, Reason.MEMORY_LIMIT), ({}, Reason.CAPTURE_FAILED)],
)
def test_up_front_the_reason_is_that_of_the_capture(config: dict[str, Any], reason: Reason) -> None:
    encoder = RowsEncoder(fails_above=99 if config else 0)
    manager = rows_manager(encoder, capture="upfront", **config)
    with pytest.raises(CaptureError):
        manager.capture()
    manager.execute(rows(2))
    assert manager.stats().misses == {reason: 2}


@torch.no_grad()
@pytest.mark.parametrize("on_change", ["recapture", "eager"])
@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize("again", ["capture", "capture_model", "refit"])
def test_what_is_captured_after_a_change_is_captured_anew(
    on_change: Any, capture: Any, again: str
) -> None:
    model = load_recipe("clip:tiny").build_encoder()
    config = GraphConfig(row_budgets=(1, 2), capture=capture, on_change=on_change)
    x = torch.randn(2, 3, 56, 56)
    with mmgraph.attach(model, config) as handle:
        model(x)
        linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
        linear.weight = nn.Parameter(torch.randn_like(linear.weight), requires_grad=False)
        if again == "capture_model":
            mmgraph.capture_model(encoder=handle)
        else:
            getattr(handle, again)()
            handle.capture()
        ours = model(x).last_hidden_state
        with mmgraph.encoders.eager_towers():
            torch.testing.assert_close(ours, model(x).last_hidden_state, rtol=1e-3, atol=1e-3)
        assert handle.stats().hits == 4
