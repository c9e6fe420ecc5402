"""Encoders of both layouts: what they read off a call and hand to a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mmgraph import (
    EncoderBatch,
    EncoderItemSpec,
    GraphKey,
    InvalidInputError,
    supports_encoder_cudagraph,
)
from mmgraph.encoders import CallSignature, TowerEncoder
from mmgraph.encoders.metadata import PackedMetadata
from tests.encoders.cases import GRIDS, OFFSETS, TOKENS_PER_ROW, call_of, make_encoder

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_encoders_are_what_the_manager_asks_for(encoder: TowerEncoder) -> None:
    assert supports_encoder_cudagraph(encoder)


def test_rows_are_items_of_as_many_tokens_as_patches(rows: TowerEncoder) -> None:
    batch = rows.item_specs(call_of("rows"))
    assert batch.items == (EncoderItemSpec(TOKENS_PER_ROW),) * 3
    facts = rows.encoder_facts()
    assert (facts.layout, facts.tokens_per_row) == ("rows", TOKENS_PER_ROW)
    assert (facts.modalities, facts.eager_returns) == (("image",), "tree")


def test_packed_items_are_read_off_the_grids(packed: TowerEncoder) -> None:
    batch = packed.item_specs(call_of("packed"))
    assert [item.num_tokens for item in batch.items] == [16, 16, 12]
    assert [item.num_segments for item in batch.items] == [(1,), (2,), (1,)]
    assert [item.geometry for item in batch.items] == GRIDS
    facts = packed.encoder_facts()
    assert (facts.layout, facts.token_granularity, facts.tokens_per_row) == ("packed", 4, 1)


@pytest.mark.parametrize(
    "grid",
    [
        torch.tensor(GRIDS),
        torch.tensor(GRIDS, dtype=torch.int32),
        GRIDS,  # a list of tuples
        [list(g) for g in GRIDS],
    ],
    ids=["int64", "int32", "tuples", "lists"],
)
def test_grids_may_be_tensors_or_lists(packed: TowerEncoder, grid: Any) -> None:
    call = call_of("packed")
    assert packed.item_specs({**call, "grid_thw": grid}) == packed.item_specs(call)


def test_a_lone_grid_is_one_item(packed: TowerEncoder) -> None:
    call = call_of("packed", 1)
    assert packed.item_specs({**call, "grid_thw": torch.tensor(GRIDS[0])}) == packed.item_specs(
        call
    )


def test_grids_changed_in_place_are_read_again(packed: TowerEncoder) -> None:
    call = call_of("packed")
    packed.item_specs(call)
    call["grid_thw"][0] = torch.tensor([4, 2, 2])
    assert packed.item_specs(call).items[0].geometry == (4, 2, 2)
    call["grid_thw"][0] = torch.tensor([1, 2, 2])
    with pytest.raises(InvalidInputError):
        packed.item_specs(call)


def test_the_signature_is_what_a_capture_bakes_in(encoder: TowerEncoder, layout: str) -> None:
    name = encoder.signature.main_input
    call = call_of(layout)
    signature = encoder.item_specs(call).signature
    assert isinstance(signature, CallSignature)
    assert signature.tensors == ((name, tuple(call[name].shape[1:]), torch.float32),)
    assert signature.constants == ()
    hash(signature)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda call, name: {**call, name: call[name] + 1}, True),  # contents
        (lambda call, name: {**call, "use_cache": True}, True),  # a word for the decoder
        (lambda call, name: {**call, name: call[name].half()}, False),  # dtype
        (lambda call, name: {**call, name: call[name][..., :-1]}, False),  # trailing shape
        (lambda call, name: {**call, "output_hidden_states": True}, False),  # a constant
        (lambda call, name: {**call, "more": [1, 2]}, False),  # a list of numbers
    ],
    ids=["contents", "use_cache", "dtype", "shape", "constant", "list"],
)
def test_calls_share_graphs_only_if_they_have_one_signature(
    encoder: TowerEncoder, layout: str, change: Any, same: bool
) -> None:
    call = call_of(layout)
    changed = change(call, encoder.signature.main_input)
    signatures = [encoder.item_specs(c).signature for c in (call, changed)]
    assert (signatures[0] == signatures[1]) is same


def test_the_number_of_items_is_not_in_the_signature(encoder: TowerEncoder, layout: str) -> None:
    one, three = (encoder.item_specs(call_of(layout, n)).signature for n in (1, 3))
    assert one == three


@pytest.mark.parametrize("flag", ["output_hidden_states", "return_dict"])
def test_a_switch_of_the_config_is_in_the_signature(layout: str, flag: str) -> None:
    encoder = make_encoder(layout)
    call = call_of(layout)
    before = encoder.item_specs(call).signature
    setattr(encoder.tower.module.config, flag, not getattr(encoder.tower.module.config, flag))
    assert encoder.item_specs(call).signature != before


def test_the_order_of_keywords_is_not_in_the_signature(rows: TowerEncoder) -> None:
    call = {**call_of("rows"), "mask": torch.ones(3, 16)}
    turned = dict(reversed(call.items()))
    assert rows.item_specs(call) == rows.item_specs(turned)


@pytest.mark.parametrize("items", [[0], [2], [0, 2], [2, 0], [0, 1, 2]])
def test_select_items_of_rows_takes_these_rows_of_every_tensor(
    rows: TowerEncoder, items: list[int]
) -> None:
    call = {**call_of("rows"), "mask": torch.arange(3), "interpolate_pos_encoding": False}
    selected = rows.select_items(call, items)
    assert torch.equal(selected["pixel_values"], call["pixel_values"][items])
    assert selected["mask"].tolist() == items
    assert selected["interpolate_pos_encoding"] is False
    assert list(selected) == list(call)


@pytest.mark.parametrize("items", [[0], [2], [0, 2], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("as_list", [False, True])
def test_select_items_of_packed_takes_their_patches_and_grids(
    packed: TowerEncoder, items: list[int], as_list: bool
) -> None:
    call = {**call_of("packed"), "output_hidden_states": True}
    given = {**call, "grid_thw": GRIDS} if as_list else call
    selected = packed.select_items(given, items)
    patches = [row for i in items for row in range(OFFSETS[i], OFFSETS[i + 1])]
    assert torch.equal(selected["hidden_states"], call["hidden_states"][patches])
    assert selected["grid_thw"].tolist() == [list(GRIDS[i]) for i in items]
    assert selected["output_hidden_states"] is True
    assert call["grid_thw"].tolist() == [list(g) for g in GRIDS]


@pytest.mark.parametrize("items", [(0,), (1,), (0, 2), (1, 2), (0, 1, 2)])
def test_replay_inputs_are_the_rows_of_the_items_end_to_end(
    encoder: TowerEncoder, layout: str, items: tuple[int, ...]
) -> None:
    call, name = call_of(layout), encoder.signature.main_input
    batch = encoder.item_specs(call)
    key = GraphKey(64, (8,), (64,), batch.signature)
    pieces = encoder.replay_inputs(call, batch, items, key)[name]
    assert torch.equal(torch.cat(list(pieces)), encoder.select_items(call, items)[name])
    assert all(p.untyped_storage().data_ptr() == call[name].data_ptr() for p in pieces)


def test_capture_inputs_hold_the_budget_of_the_key(encoder: TowerEncoder, layout: str) -> None:
    call, name = call_of(layout), encoder.signature.main_input
    key = GraphKey(64, (8,), (64,), encoder.item_specs(call).signature)
    specs = encoder.capture_inputs(key)
    rows = {"rows": 64 // TOKENS_PER_ROW, "packed": 64}[layout]
    assert specs[name].shape == (rows, *call[name].shape[1:])
    assert specs[name].dtype == torch.float32
    assert set(specs) - {name} == ({"metadata"} if layout == "packed" else set())


def test_an_uploaded_block_is_remembered_by_grids_and_key(packed: TowerEncoder) -> None:
    call = call_of("packed")
    batch = packed.item_specs(call)
    key, other = (GraphKey(n, (8,), (64,), batch.signature) for n in (64, 128))

    def block(items: tuple[int, ...], key: GraphKey) -> torch.Tensor:
        (piece,) = packed.replay_inputs(call, batch, items, key)["metadata"]
        return piece

    first = block((0, 1), key)
    assert block((0, 1), key) is first
    assert block((0, 1), other).numel() > first.numel()
    assert not torch.equal(block((1, 2), key), first)


def test_a_capture_prepares_for_new_grids_of_its_budget(
    packed: TowerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(PackedMetadata, "prepare", lambda _, tokens: prepared.append(tokens))
    signature = packed.item_specs(call_of("packed")).signature
    packed.capture_inputs(GraphKey(64, (8,), (64,), signature))
    assert prepared == [64]


@pytest.mark.parametrize(("budget", "max_items"), [(64, 1), (64, 8), (256, 3), (16, 8)])
def test_examples_fit_their_budget(
    encoder: TowerEncoder, layout: str, budget: int, max_items: int
) -> None:
    examples = encoder.encoder_facts().examples(budget, max_items)
    assert examples
    for example in examples:
        assert 1 <= len(example.items) <= (max_items if layout == "packed" else budget)
        assert sum(item.num_tokens for item in example.items) <= budget
        assert example.signature == encoder.item_specs(call_of(layout)).signature


def test_an_example_of_a_budget_fills_it(encoder: TowerEncoder) -> None:
    (first, *_) = encoder.encoder_facts().examples(64, 1)
    assert sum(item.num_tokens for item in first.items) == 64


def test_a_rehearsed_call_is_what_examples_look_like(layout: str) -> None:
    encoder = make_encoder(layout)
    call = {**call_of(layout), "output_hidden_states": True}
    encoder.rehearse(call)
    (example, *_) = encoder.encoder_facts().examples(64, 8)
    assert example.signature == encoder.item_specs(call).signature


def test_an_example_call_runs(encoder: TowerEncoder) -> None:
    call = encoder.example_call()
    assert isinstance(encoder.item_specs(call), EncoderBatch)
    output = encoder.embed_multimodal(**call)
    assert torch.isfinite(output.last_hidden_state).all()


def test_an_example_call_draws_no_random_number_of_the_user(encoder: TowerEncoder) -> None:
    state = torch.get_rng_state()
    encoder.example_call()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_encoder_calls_the_method_as_it_was_when_it_was_made(layout: str) -> None:
    encoder, call = make_encoder(layout), call_of(layout)
    before = copy.deepcopy(encoder.tower.module)
    encoder.tower.module.forward = lambda **_: pytest.fail("somebody's wrapper was called")
    output = encoder.embed_multimodal(**call)
    assert torch.equal(output.last_hidden_state, before(**call).last_hidden_state)


def test_a_new_size_is_read_like_the_first_call_of_its_kind(packed: TowerEncoder) -> None:
    """Where only sizes are new, all is known beforehand; what is wrong is found all the same."""
    name = packed.signature.main_input
    call = call_of("packed")
    width = call[name].shape[1]

    def of(grid: Any, rows: int, **more: Any) -> dict[str, Any]:
        return {name: torch.randn(rows, width), "grid_thw": torch.tensor(grid), **more}

    first = packed.item_specs(call)
    for grid in ([[1, 4, 6]], [[1, 8, 2], [2, 4, 4]], [[1, 4, 6]]):
        rows = sum(t * h * w for t, h, w in grid)
        known, fresh = packed.item_specs(of(grid, rows)), make_encoder("packed")
        assert known == fresh.item_specs(of(grid, rows))
        assert known.signature == first.signature
    more = packed.item_specs(of([[1, 4, 8]], 32, output_hidden_states=True))
    assert more.signature != first.signature
    for grid, rows in (([[1, 4, 6]], 25), ([[1, 3, 4]], 12), ([[1, 0, 4]], 0), ([[1, 4]], 4)):
        with pytest.raises(InvalidInputError):
            packed.item_specs(of(grid, rows))
