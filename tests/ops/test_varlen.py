"""Attention over packed segments: equal to dense attention on each, and never across them."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mmgraph.ops import (
    VARLEN_ATTENTION,
    register_varlen_attention,
    varlen_attention,
    varlen_attention_reference,
)

RAGGED = [1, 64, 7, 333, 200, 512, 96, 3, 128, 777]
HALF = [torch.float16, torch.bfloat16]
NAN = float("nan")
Attention = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(
    num_tokens: int,
    num_heads: int = 4,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kv_heads: int | None = None,
) -> Attention:
    """Queries, keys and values (T, H, K) that are the same for the same shape on every device."""
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    heads = (num_heads, kv_heads or num_heads, kv_heads or num_heads)
    query, key, value = (
        torch.randn(num_tokens, h, head_dim, generator=generator).to(device, dtype) for h in heads
    )
    return query, key, value


def boundaries(lengths: list[int], *, repeats: int = 0, device: str = "cpu") -> torch.Tensor:
    """Cumulative lengths, the last one `repeats` times more."""
    ends = list(accumulate(lengths, initial=0))
    return torch.tensor([*ends, *ends[-1:] * repeats], dtype=torch.int32, device=device)


def by_segment(qkv: Attention, lengths: list[int], scale: float | None = None) -> torch.Tensor:
    """Dense attention on each segment; no rows for what lies outside."""
    outputs = [qkv[0][:0]]
    start = 0
    for length in lengths:
        query, key, value = (x[start : start + length].transpose(0, 1)[None] for x in qkv)
        if length:
            dense = F.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            outputs.append(dense[0].transpose(0, 1))
        start += length
    return torch.cat(outputs)


def assert_equal_by_segment(
    output: torch.Tensor, qkv: Attention, lengths: list[int], scale: float | None = None
) -> None:
    inside = sum(lengths)
    torch.testing.assert_close(output[:inside], by_segment(qkv, lengths, scale))
    assert (output[inside:] == 0).all()


@pytest.mark.parametrize(
    ("lengths", "outside", "max_seqlen", "repeats"),
    [
        ([16], 0, 16, 0),  # one segment
        ([1, 5, 16, 2], 0, 16, 0),  # ragged
        ([1] * 9, 0, 1, 0),  # every row alone
        ([4, 0, 3], 0, 4, 0),  # an empty segment in the middle
        ([0, 4], 0, 4, 0),  # at the start
        ([4, 0], 3, 4, 0),  # at the end, before rows of none
        ([0, 0], 5, 1, 0),  # nothing but empty segments
        ([5, 3], 4, 5, 0),  # rows outside
        ([5, 3], 4, 64, 0),  # a bound far above the longest, and above all rows
        ([5, 3], 4, 8, 6),  # a table padded with repeated ends
        ([5, 3], 0, 8, 6),  # padded where every row is used
    ],
)
def test_the_reference_is_dense_attention_by_segment(
    lengths: list[int], outside: int, max_seqlen: int, repeats: int
) -> None:
    qkv = tensors(sum(lengths) + outside)
    output = varlen_attention_reference(*qkv, boundaries(lengths, repeats=repeats), max_seqlen)
    assert output.shape == qkv[0].shape
    assert_equal_by_segment(output, qkv, lengths)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from([None, 0.5]),
)
def test_the_reference_holds_for_any_segments(
    lengths: list[int], outside: int, beyond: int, repeats: int, scale: float | None
) -> None:
    qkv = tensors(max(1, sum(lengths) + outside), num_heads=2, head_dim=8)
    cu_seqlens = boundaries(lengths, repeats=repeats)
    output = varlen_attention_reference(*qkv, cu_seqlens, max(lengths) + beyond, scale)
    assert_equal_by_segment(output, qkv, lengths, scale)


def test_the_scale_is_one_over_the_root_of_the_head_dim_by_default() -> None:
    qkv, cu_seqlens = tensors(8, head_dim=64), boundaries([8])
    default, same, other = (
        varlen_attention_reference(*qkv, cu_seqlens, 8, scale) for scale in (None, 0.125, 1.0)
    )
    torch.testing.assert_close(default, same)
    assert not torch.allclose(default, other)


@pytest.mark.parametrize("poisoned", [0, 1, 2], ids=["queries", "keys", "values"])
def test_nan_in_one_segment_stays_there(poisoned: int) -> None:
    lengths = [4, 3, 5]
    qkv = tensors(12)
    clean = varlen_attention_reference(*qkv, boundaries(lengths), 8)
    qkv[poisoned][4:7] = NAN
    output = varlen_attention_reference(*qkv, boundaries(lengths), 8)
    assert output[4:7].isnan().all()
    assert torch.equal(output[:4], clean[:4])
    assert torch.equal(output[7:], clean[7:])


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_what_rows_outside_hold_is_harmless(value: float) -> None:
    lengths = [4, 3]
    qkv = tensors(12)
    clean = varlen_attention_reference(*qkv, boundaries(lengths, repeats=2), 8)
    for x in qkv:
        x[7:] = value
    output = varlen_attention_reference(*qkv, boundaries(lengths, repeats=2), 8)
    assert torch.equal(output, clean)
    assert (output[7:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_on_the_cpu_the_reference_serves_every_dtype(dtype: torch.dtype) -> None:
    qkv, cu_seqlens = tensors(8, dtype=dtype), boundaries([5, 2])
    output = varlen_attention(*qkv, cu_seqlens, 5)
    assert output.dtype == dtype
    assert torch.equal(output, varlen_attention_reference(*qkv, cu_seqlens, 5))


def interface(qkv: Attention, **kwargs: object) -> torch.Tensor:
    """Call what is registered with transformers, as a tower does: (1, H, T, K) in."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_varlen_attention()
    register_varlen_attention()  # twice changes nothing
    attention = ALL_ATTENTION_FUNCTIONS[VARLEN_ATTENTION]
    batch = [x.transpose(0, 1)[None] for x in qkv]
    output, weights = attention(torch.nn.Module(), *batch, **kwargs)
    assert weights is None
    return output


def test_the_name_makes_towers_pass_on_their_segments() -> None:
    assert "flash" in VARLEN_ATTENTION


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_interface_gives_each_group_of_heads_its_key(kv_heads: int) -> None:
    lengths = [5, 1, 6]
    qkv = tensors(12, kv_heads=kv_heads)
    cu_seqlens = boundaries(lengths)
    output = interface(
        qkv, attention_mask=None, scaling=0.3, cu_seq_lens_q=cu_seqlens, max_length_q=8, dropout=0.0
    )
    assert output.shape == (1, 12, 4, 16)
    assert_equal_by_segment(output[0], qkv, lengths, 0.3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},  # no segments at all
        {"max_length_q": 8},  # no boundaries
        {"cu_seq_lens_q": boundaries([8])},  # no bound
        {  # a mask, which says that the tower isn't packed
            "cu_seq_lens_q": boundaries([8]),
            "max_length_q": 8,
            "attention_mask": torch.ones(1, 1, 8, 8),
        },
    ],
)
def test_the_interface_refuses_what_is_not_packed(kwargs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{VARLEN_ATTENTION} attends within segments only"):
        interface(tensors(8), **kwargs)


def exact(qkv: Attention, lengths: list[int]) -> torch.Tensor:
    return by_segment(tuple(x.double() for x in qkv), lengths)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize(
    ("outside", "max_seqlen", "repeats"),
    [
        (0, 777, 0),  # exact
        (100, 1024, 0),  # rows outside, a bound above the longest
        (100, 4096, 54),  # the table padded to 64 segments, a bound above every row
    ],
    ids=["exact", "bounded", "padded"],
)
def test_flash_loses_no_more_than_dense_attention(
    dtype: torch.dtype, head_dim: int, outside: int, max_seqlen: int, repeats: int
) -> None:
    inside = sum(RAGGED)
    qkv = tensors(inside + outside, 8, head_dim, dtype, "cuda")
    cu_seqlens = boundaries(RAGGED, repeats=repeats, device="cuda")
    output = varlen_attention(*qkv, cu_seqlens, max_seqlen)[:inside]
    truth = exact(qkv, RAGGED)
    assert output.dtype == dtype
    assert relative(output, truth) <= 1.10 * relative(by_segment(qkv, RAGGED), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_flash_serves_grouped_heads_through_the_interface(
    dtype: torch.dtype, kv_heads: int
) -> None:
    qkv = tensors(sum(RAGGED), 8, 80, dtype, "cuda", kv_heads)
    cu_seqlens = boundaries(RAGGED, repeats=6, device="cuda")
    (output,) = interface(qkv, scaling=None, cu_seq_lens_q=cu_seqlens, max_length_q=1024)
    truth = exact(qkv, RAGGED)
    assert relative(output, truth) <= 1.10 * relative(by_segment(qkv, RAGGED), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("poisoned", [0, 1, 2], ids=["queries", "keys", "values"])
def test_flash_keeps_nan_where_it_is(dtype: torch.dtype, poisoned: int) -> None:
    lengths, inside = [130, 7, 200], 337
    qkv = tensors(400, 4, 72, dtype, "cuda")
    cu_seqlens = boundaries(lengths, repeats=5, device="cuda")
    clean = varlen_attention(*qkv, cu_seqlens, 512)
    qkv[poisoned][130:137] = NAN
    qkv[poisoned][inside:] = NAN
    output = varlen_attention(*qkv, cu_seqlens, 512)
    assert output[130:137].isnan().all()
    assert torch.equal(output[:130], clean[:130])
    assert torch.equal(output[137:inside], clean[137:inside])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float32, 64),  # a dtype that flash doesn't take
        (torch.bfloat16, 36),  # a head dim that isn't a multiple of 8
        (torch.bfloat16, 264),  # a head dim that is too large
    ],
)
def test_on_a_gpu_the_reference_serves_the_rest(dtype: torch.dtype, head_dim: int) -> None:
    lengths = [30, 0, 70]
    qkv = tensors(128, 2, head_dim, dtype, "cuda")
    cu_seqlens = boundaries(lengths, repeats=2, device="cuda")
    output = varlen_attention(*qkv, cu_seqlens, 128)
    assert torch.equal(output, varlen_attention_reference(*qkv, cu_seqlens, 128))
    assert (output[100:] == 0).all()
    truth = exact(qkv, lengths)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative(output[:100], truth) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_captured_call_follows_other_segments_of_the_same_table(dtype: torch.dtype) -> None:
    """Boundaries are read on the device: nothing but the bounds is baked in."""
    qkv = tensors(256, 4, 80, dtype, "cuda")
    cu_seqlens = boundaries([64, 64, 64, 64], device="cuda")
    varlen_attention(*qkv, cu_seqlens, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = varlen_attention(*qkv, cu_seqlens, 256)
    for lengths in ([256, 0, 0, 0], [1, 200, 30, 5], [64, 64, 64, 64]):
        cu_seqlens.copy_(boundaries(lengths))
        graph.replay()
        inside = sum(lengths)
        expected = varlen_attention(*qkv, cu_seqlens, 256)
        torch.testing.assert_close(output[:inside], expected[:inside])
