"""Outputs: the structure of the encoder's own, and each row back where its item was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mmgraph import CaptureError, EncoderBatch, EncoderItemSpec
from mmgraph.manager.outputs import Collector, OutputLayout, flatten_outputs


def batch_of(*tokens: int) -> EncoderBatch:
    return EncoderBatch(tuple(EncoderItemSpec(n) for n in tokens))


def record(
    output: Any, num_tokens: int = 16, granularity: int = 4, *, rows: bool = False
) -> tuple[OutputLayout, list[torch.Tensor]]:
    return OutputLayout.record(output, num_tokens, granularity, rows=rows)


def numbered(*shape: int, dim: int = 0) -> torch.Tensor:
    """A tensor whose values are their index along `dim`."""
    index = torch.arange(shape[dim], dtype=torch.float32)
    return index.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape).clone()


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((16, 3), (16, 0)),  # patches
        ((4, 3), (4, 0)),  # merged by four
        ((8, 3), (8, 0)),  # by two
        ((16,), (16, 0)),  # a number a patch
        ((1, 16, 3), (16, 1)),  # after a batch dimension of one
        ((3, 4, 5), (4, 1)),  # merged, layers first
        ((16, 16), (16, 0)),  # a width that happens to be the same
    ],
)
def test_packed_outputs_are_divided_where_the_tokens_are(
    shape: tuple[int, ...], split: tuple[int, int]
) -> None:
    rows, dim = split
    layout, (tensor,) = record(numbered(*shape, dim=dim))
    parts = layout.split(tensor, batch_of(8, 4, 4))
    assert [p.shape[dim] for p in parts] == [rows // 2, rows // 4, rows // 4]
    assert torch.equal(torch.cat(parts, dim), tensor)


def test_rows_are_divided_along_the_first_dimension_only() -> None:
    layout, (tensor,) = record(numbered(4, 7, 3), 64, 16, rows=True)
    parts = layout.split(tensor, batch_of(16, 16, 16, 16))
    assert [p.shape for p in parts] == [(7, 3)] * 4


@pytest.mark.parametrize(
    ("output", "rows", "message"),
    [
        (torch.zeros(5, 3), False, r"an output of shape \(5, 3\) for 16 tokens can't be divided"),
        (torch.zeros(3, 5, 16), False, "can't be divided"),  # the tokens are too deep inside
        (torch.zeros(()), False, "can't be divided"),  # a number for all
        (torch.zeros(1, 4, 3), True, "can't be divided"),  # rows after a batch dimension
        (torch.zeros(8, 3), True, "can't be divided"),  # twice as many as rows
        ((torch.zeros(16, 3), torch.zeros(5)), False, "can't be divided"),  # one of several
        ((), False, "the encoder returned no tensor"),
        ({"loss": None}, False, "the encoder returned no tensor"),
    ],
)
def test_outputs_that_do_not_follow_the_items_can_not_be_captured(
    output: Any, rows: bool, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        record(output, rows=rows)


@dataclass
class Opaque:
    tensor: torch.Tensor


def test_a_structure_that_torch_does_not_know_can_not_be_captured() -> None:
    with pytest.raises(CaptureError, match="no tensor"):
        record(Opaque(torch.zeros(16, 3)))


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(16, 3),
        (torch.zeros(16, 3), torch.ones(4, 2)),
        [torch.zeros(16, 3), None, 7, "text"],  # constants come back as they were
        {"a": (torch.zeros(4, 3), [torch.ones(16)]), "b": None},
        BaseModelOutputWithPooling(
            last_hidden_state=torch.zeros(16, 3),
            pooler_output=torch.ones(4, 3),
            hidden_states=(torch.zeros(16, 3), torch.ones(16, 3)),
        ),
    ],
)
def test_the_structure_of_an_output_comes_back(output: Any) -> None:
    layout, tensors = record(output)
    fresh = [torch.full_like(t, i + 10.0) for i, t in enumerate(tensors)]
    built = layout.build(fresh)
    assert type(built) is type(output)
    assert [id(t) for t in flatten_outputs(built)] == [id(t) for t in fresh]
    again, _ = record(built)
    assert again == layout


def test_a_tensor_that_occurs_twice_is_copied_once_and_stays_the_same_twice() -> None:
    shared = torch.zeros(16, 3)
    output = {"last": shared, "all": (torch.ones(16, 3), shared)}
    layout, tensors = record(output)
    assert len(tensors) == len(layout.leaves) == 2
    built = layout.build([t.clone() for t in tensors])
    assert built["last"] is built["all"][1]


def collect(layout: OutputLayout, batch: EncoderBatch, parts: Any) -> list[torch.Tensor]:
    collector = Collector(layout, batch)
    for items, tensors in parts:
        collector.add(items, tensors)
    return collector.results


@pytest.mark.parametrize(
    "division",
    [
        [(0, 1, 2, 3)],  # all at once
        [(0,), (1,), (2,), (3,)],  # one by one
        [(3,), (1,), (0,), (2,)],  # in another order
        [(0, 2), (1, 3)],  # interleaved
        [(1, 2, 3), (0,)],
        [(0, 1, 3), (2,)],  # neighbours and one that isn't
    ],
)
@pytest.mark.parametrize("padding", [0, 8])
def test_rows_come_back_in_the_order_of_the_call(
    division: list[tuple[int, ...]], padding: int
) -> None:
    tokens = [8, 4, 16, 12]
    batch = batch_of(*tokens)
    whole = torch.arange(40.0)
    items = whole.split(tokens)
    parts = []
    for chosen in division:
        rows = torch.cat([*(items[i] for i in chosen), torch.full((padding,), float("nan"))])
        layout, tensors = record((rows[:, None], rows[::4, None].clone()), len(rows))
        parts.append((chosen, tensors))
    patches, merged = collect(layout, batch, parts)
    assert torch.equal(patches[:, 0], whole)
    assert torch.equal(merged[:, 0], whole[::4])


def test_collected_tensors_are_new() -> None:
    source = torch.arange(16.0)[:, None]
    layout, tensors = record(source)
    (result,) = collect(layout, batch_of(16), [((0,), tensors)])
    source.fill_(-1)
    assert torch.equal(result[:, 0], torch.arange(16.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_collected_tensors_keep_dtype_and_trailing_shape(dtype: torch.dtype) -> None:
    layout, tensors = record(torch.ones(1, 16, 5, dtype=dtype))
    (result,) = collect(layout, batch_of(8, 4), [((0, 1), tensors)])
    assert (result.dtype, result.shape) == (dtype, (1, 12, 5))


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_any_number_of_tensors_is_copied(count: int) -> None:
    tree = [torch.arange(16.0)[:, None] + i for i in range(count)]
    layout, tensors = record(tree)
    results = collect(layout, batch_of(8, 8), [((1,), tensors), ((0,), tensors)])
    for result, tensor in zip(results, tree, strict=True):
        assert torch.equal(result, tensor[:8].repeat(2, 1))
