"""Which calls the encoders of both layouts refuse, and under which reason."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from mmgraph import GraphKey, InvalidInputError, Reason
from mmgraph.encoders import TowerEncoder
from tests.encoders.cases import GRIDS, call_of, make_encoder, refusal_of

pytestmark = pytest.mark.usefixtures("without_gradients")


def training(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    encoder.tower.module.train()
    return nullcontext()


def weights_want_gradients(
    encoder: TowerEncoder, call: dict[str, Any]
) -> AbstractContextManager[Any]:
    return torch.enable_grad()


def input_wants_gradients(
    encoder: TowerEncoder, call: dict[str, Any]
) -> AbstractContextManager[Any]:
    encoder.tower.module.requires_grad_(False)
    call[encoder.signature.main_input].requires_grad_()
    return torch.enable_grad()


def autocast(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def integers(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    call[encoder.signature.main_input] = call[encoder.signature.main_input].long()
    return nullcontext()


def inputs_on_meta(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    call[encoder.signature.main_input] = call[encoder.signature.main_input].to("meta")
    return nullcontext()


def weights_on_meta(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    encoder.tower.module.to("meta")
    return nullcontext()


def mapping(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    call["more"] = {"a": 1}
    return nullcontext()


def no_main_input(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    del call[encoder.signature.main_input]
    return nullcontext()


def list_input(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    call[encoder.signature.main_input] = call[encoder.signature.main_input].tolist()
    return nullcontext()


def flat_input(encoder: TowerEncoder, call: dict[str, Any]) -> AbstractContextManager[Any]:
    call[encoder.signature.main_input] = call[encoder.signature.main_input].flatten()
    return nullcontext()


@pytest.mark.parametrize(
    ("change", "reason", "num_items"),
    [
        (training, Reason.TRAINING, 3),
        (weights_want_gradients, Reason.GRAD, 3),
        (input_wants_gradients, Reason.GRAD, 3),
        (autocast, Reason.AUTOCAST, 3),
        (integers, Reason.DTYPE, 3),
        (inputs_on_meta, Reason.DEVICE, 3),
        (weights_on_meta, Reason.PLACEMENT, 3),
        (mapping, Reason.UNSUPPORTED_CALL, 3),
        (no_main_input, Reason.UNSUPPORTED_CALL, 1),  # can't be read: counts as one
        (list_input, Reason.UNSUPPORTED_CALL, 1),
        (flat_input, Reason.UNSUPPORTED_CALL, 1),
    ],
)
def test_calls_in_the_wrong_mode_are_refused(
    layout: str, change: Any, reason: Reason, num_items: int
) -> None:
    encoder, call = make_encoder(layout), call_of(layout)
    encoder.item_specs(call)  # it is fine before the change
    with change(encoder, call):
        refusal = refusal_of(encoder, call)
    assert refusal.reason is reason
    assert refusal.num_items == num_items


def test_no_items_are_refused_as_none(encoder: TowerEncoder, layout: str) -> None:
    refusal = refusal_of(encoder, call_of(layout, 0))
    assert refusal.reason is Reason.NO_ITEMS
    assert refusal.num_items == 0


def test_a_call_inside_a_compiler_is_refused(
    encoder: TowerEncoder, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert refusal_of(encoder, call_of(layout)).reason is Reason.COMPILING


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_every_mode_is_served(
    encoder: TowerEncoder, layout: str, mode: type
) -> None:
    with torch.enable_grad(), mode():
        assert len(encoder.item_specs(call_of(layout)).items) == 3


def test_frozen_weights_are_served_with_gradients_enabled(layout: str) -> None:
    encoder = make_encoder(layout)
    encoder.tower.module.requires_grad_(False)
    with torch.enable_grad():
        assert len(encoder.item_specs(call_of(layout)).items) == 3


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mask": torch.ones(2)}, Reason.UNSUPPORTED_CALL),  # fewer entries than rows
        ({"mask": torch.ones(())}, Reason.UNSUPPORTED_CALL),  # none
        ({"mask": torch.ones(3, device="meta")}, Reason.DEVICE),  # elsewhere
        ({"sizes": torch.ones(3, device="meta").int()}, Reason.UNSUPPORTED_CALL),  # to be read
    ],
)
def test_tensors_that_do_not_go_with_the_rows_are_refused(
    rows: TowerEncoder, more: dict[str, Any], reason: Reason
) -> None:
    rows.item_specs({**call_of("rows"), "mask": torch.ones(3)})  # one that goes with them
    refusal = refusal_of(rows, {**call_of("rows"), **more})
    assert refusal.reason is reason
    assert refusal.num_items == 3


def test_tensors_that_go_with_the_rows_are_buffers_of_their_own(rows: TowerEncoder) -> None:
    call = {**call_of("rows"), "mask": torch.ones(3, 16, dtype=torch.bool)}
    batch = rows.item_specs(call)
    specs = rows.capture_inputs(GraphKey(64, signature=batch.signature))
    assert (specs["mask"].shape, specs["mask"].dtype) == ((4, 16), torch.bool)


@pytest.mark.parametrize(
    ("more", "detail"),
    [
        ({"cu_seqlens": torch.tensor([0, 44])}, "tensors besides the patches"),  # ours to make
        ({"output_attentions": True}, "packed attention gives no weights"),
    ],
)
def test_packed_calls_with_more_than_patches_are_refused(
    packed: TowerEncoder, more: dict[str, Any], detail: str
) -> None:
    refusal = refusal_of(packed, {**call_of("packed"), **more})
    assert refusal.reason is Reason.UNSUPPORTED_CALL
    assert refusal.num_items == 3
    assert str(refusal).startswith(detail)


def test_attention_weights_asked_for_by_the_config_are_refused() -> None:
    encoder = make_encoder("packed")
    encoder.tower.module.set_attn_implementation("eager")
    encoder.tower.module.config.output_attentions = True
    assert refusal_of(encoder, call_of("packed")).reason is Reason.UNSUPPORTED_CALL


def test_patches_without_a_grid_are_refused(packed: TowerEncoder) -> None:
    call = {**call_of("packed"), "grid_thw": None}
    assert refusal_of(packed, call).reason is Reason.UNSUPPORTED_CALL


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        # more patches than there are, where eager mode would read beyond them
        ([(1, 4, 4)] * 3, "stands for 48 patches, but hidden_states has 44 rows"),
        # fewer
        ([(1, 4, 4)], "stands for 16 patches, but hidden_states has 44 rows"),
        # none at all
        ([], "stands for 0 patches, but hidden_states has 44 rows"),
        # not a whole number of merge groups
        ([(1, 4, 11)], "holds (1, 4, 11), but a grid is (t, h, w) in patches"),
        # negative, with the right product
        ([(1, -4, -11)], "holds (1, -4, -11), but"),
        # nothing in it
        ([*GRIDS, (0, 4, 4)], "holds (0, 4, 4), but"),
        # no time
        ([(4, 11)], "holds (4, 11), but"),
    ],
)
def test_grids_that_contradict_the_patches_are_an_error(
    packed: TowerEncoder, grids: list[tuple[int, ...]], message: str
) -> None:
    for grid in (grids, torch.tensor(grids) if grids else torch.empty(0, 3, dtype=torch.int64)):
        with pytest.raises(InvalidInputError, match=re.escape(message)):
            packed.item_specs({**call_of("packed"), "grid_thw": grid})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_a_grid_of_other_numbers_is_an_error_and_leaves_nothing(dtype: torch.dtype) -> None:
    """1.0 is equal to 1, and has the same hash."""
    encoder, call = make_encoder("packed"), call_of("packed")
    with pytest.raises(InvalidInputError, match="must hold integers"):
        encoder.item_specs({**call, "grid_thw": call["grid_thw"].to(dtype)})
    assert all(isinstance(n, int) for i in encoder.item_specs(call).items for n in i.geometry)
    with pytest.raises(InvalidInputError, match=r"\(1, 3, 3\) of torch.int64"):
        encoder.item_specs({**call, "grid_thw": call["grid_thw"][None]})


@pytest.mark.parametrize("make", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "numpy"])
def test_a_grid_that_is_no_tensor_is_known_by_its_numbers(make: Any) -> None:
    encoder, call = make_encoder("packed"), call_of("packed")
    expected = encoder.item_specs(call)
    swapped = call["grid_thw"][:, [0, 2, 1]]
    other = encoder.item_specs({**call, "grid_thw": swapped})
    assert other != expected
    for _ in range(3):
        grid = make(call["grid_thw"].clone())
        assert encoder.item_specs({**call, "grid_thw": grid}) == expected
        grid[0][1], grid[0][2] = grid[0][2], grid[0][1]  # the same object, other numbers
        grid[1][1], grid[1][2] = grid[1][2], grid[1][1]
        grid[2][1], grid[2][2] = grid[2][2], grid[2][1]
        assert encoder.item_specs({**call, "grid_thw": grid}) == other
        encoder._batches.clear()  # as after very many sizes
