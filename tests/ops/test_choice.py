"""Which kernel attends: dense where segments are of one length, and whichever is the fastest."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import mmgraph.ops.choice as choice
from mmgraph.ops import (
    AttentionChoice,
    AttentionShape,
    attending,
    varlen_attention,
    varlen_attention_reference,
)
from tests.ops.test_varlen import Attention, boundaries, by_segment, tensors

LENGTHS = [[24], [12, 12], [8] * 5]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measured", {})


def attended(qkv: Attention, lengths: list[int], scale: float | None = None) -> torch.Tensor:
    table = boundaries(lengths, device=qkv[0].device.type)
    return varlen_attention(*qkv, table, max(lengths), scale)


def assert_right(output: torch.Tensor, qkv: Attention, lengths: list[int], scale: Any) -> None:
    q, k, v = (x.double() for x in qkv)
    exact = by_segment((q, k, v), lengths, scale)
    tolerance = 1e-5 if output.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_segments_of_one_length_are_a_dense_batch(
    monkeypatch: pytest.MonkeyPatch, device: str, lengths: list[int], scale: float | None
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = tensors(sum(lengths), head_dim=72, dtype=dtype, device=device)
    dense: list[int] = []
    original = choice.dense_attention

    def seen(*arguments: Any) -> torch.Tensor:
        dense.append(arguments[3])
        return original(*arguments)

    for module in ("choice", "varlen"):
        monkeypatch.setattr(f"mmgraph.ops.{module}.dense_attention", seen)
    assert_right(attended(qkv, lengths, scale), qkv, lengths, scale)
    assert not dense, "nobody said that they are"
    with attending(frozenset({(len(lengths), lengths[0])}), {}):
        assert_right(attended(qkv, lengths, scale), qkv, lengths, scale)
    assert set(dense) == {lengths[0]}


def test_what_is_said_of_one_table_is_not_taken_for_another() -> None:
    qkv = tensors(24)
    with attending(frozenset({(1, 24)})):
        assert_right(attended(qkv, [20, 4]), qkv, [20, 4], None)
        assert_right(attended(qkv, [8, 16]), qkv, [8, 16], None)


def test_it_is_forgotten_after_the_block() -> None:
    with pytest.raises(RuntimeError), attending(frozenset({(1, 24)}), {}):
        raise RuntimeError
    assert not choice.is_uniform(boundaries([24]), 24)


def test_values_of_any_strides_do() -> None:
    """Towers hand over slices of one matrix of queries, keys and values."""
    query, key, value = torch.randn(3, 2, 24, 16).transpose(1, 2).unbind(0)
    with attending(frozenset({(3, 8)})):
        output = attended((query, key, value), [8] * 3)
    assert output.is_contiguous()
    assert_right(output, (query, key, value), [8] * 3, None)


def run_cuda(lengths: list[int], choices: dict[AttentionShape, AttentionChoice]) -> torch.Tensor:
    qkv = tensors(sum(lengths), head_dim=64, dtype=torch.bfloat16, device="cuda")
    with attending(frozenset({(len(lengths), lengths[0])}), choices):
        output = attended(qkv, lengths)
    assert_right(output, qkv, lengths, None)
    return output


@pytest.mark.gpu
@pytest.mark.parametrize("fastest", ["flash", "dense"])
def test_the_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
    order = iter([1.0, 2.0] if fastest == "flash" else [2.0, 1.0])
    monkeypatch.setattr(choice, "milliseconds", lambda run: (run(), next(order))[1])
    monkeypatch.setattr(choice, "_has_flash_4", lambda: False)
    for _ in range(2):  # the second time nothing is timed
        choices: dict[AttentionShape, AttentionChoice] = {}
        run_cuda([32, 32], choices)
        ((shape, chosen),) = choices.items()
        assert (shape.tokens, shape.segments, shape.longest, shape.uniform) == (64, 2, 32, True)
        assert chosen.kernel == fastest
        assert set(chosen.milliseconds) == {"flash", "dense"}


@pytest.mark.gpu
def test_a_kernel_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package for another chip, say: installed, and of no use."""
    monkeypatch.setattr(choice, "_has_flash_4", lambda: True)
    broken = choice._Candidate(lambda *_: 1 / 0, lambda shape: True)
    monkeypatch.setitem(choice._KERNELS, "flash-4", broken)
    choices: dict[AttentionShape, AttentionChoice] = {}
    run_cuda([32, 32], choices)
    (chosen,) = choices.values()
    assert set(chosen.milliseconds) == {"flash", "dense"}


def test_a_kernel_with_another_result_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong rows behind the last segment are nobody's, and NaN that came of NaN isn't wrong."""

    def dense(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query * 2

    def right(query: torch.Tensor, *_: Any) -> torch.Tensor:
        output = query * 2.001
        output[48:] = 7
        return output

    def wrong(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query.flip(0)

    def makes_nan(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.where(torch.arange(50)[:, None, None] == 7, torch.nan, query * 2)

    kernels = {"flash": dense, "right": right, "wrong": wrong, "NaN": makes_nan}
    for name, kernel in kernels.items():
        monkeypatch.setitem(choice._KERNELS, name, choice._Candidate(kernel, lambda shape: True))
    monkeypatch.setattr(choice, "milliseconds", lambda run: 1.0)
    shape = AttentionShape(50, 3, 16, 2, 8, torch.float32, uniform=False)
    query = torch.randn(50, 2, 8)
    query[3] = torch.nan
    for _ in range(2):
        times = choice._time_each(
            list(kernels), shape, (query, query, query, boundaries([16] * 3), 16, None)
        )
        assert times == {"flash": 1.0, "right": 1.0}
    assert [record.getMessage() for record in caplog.records] == [
        f"attention kernel {name} is left out: its result is wrong" for name in ("wrong", "NaN")
    ]


@pytest.mark.gpu
def test_nothing_is_measured_in_a_capture() -> None:
    choices: dict[AttentionShape, AttentionChoice] = {}
    qkv = tensors(64, head_dim=64, dtype=torch.bfloat16, device="cuda")
    table = boundaries([32, 32], device="cuda")
    varlen_attention(*qkv, table, 32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), attending(frozenset({(2, 32)}), choices):
        output = varlen_attention(*qkv, table, 32)
    graph.replay()
    assert_right(output, qkv, [32, 32], None)
    (chosen,) = choices.values()
    assert chosen == AttentionChoice("flash")


@pytest.mark.gpu
def test_without_a_choice_it_is_flash() -> None:
    """Eager twins and tests of other things ask for no measurement."""
    qkv = tensors(64, head_dim=64, dtype=torch.bfloat16, device="cuda")
    with attending(frozenset({(2, 32)})):
        assert_right(attended(qkv, [32, 32]), qkv, [32, 32], None)
    assert not choice._measured


def test_flash_4_weighs_no_value_behind_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies them by 0, and 0 times NaN is NaN."""

    def weigh_all(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = torch.full_like(q, torch.nan)
        for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
            logits = torch.einsum("qhd,khd->hqk", q[a:b], k) * q.shape[-1] ** -0.5
            outside = torch.arange(len(k)).sub(a).div(b - a, rounding_mode="floor") != 0
            weights = logits.masked_fill(outside, -torch.inf).softmax(-1)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, v)
        return out, None

    module = types.ModuleType("flash_attn.cute")
    monkeypatch.setattr(module, "flash_attn_varlen_func", weigh_all, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    q, k, v = torch.randn(3, 8, 2, 16).unbind(0)
    q[5:], k[5:], v[5:] = torch.nan, torch.nan, torch.nan
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    ours = choice._flash_4(q, k, v, cu_seqlens, 3, None)[:5]
    expected = varlen_attention_reference(q[:5], k[:5], v[:5], cu_seqlens, 3)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert v[5:].isnan().all(), "the caller's own values were changed"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of FlashAttention 4
def test_no_kernel_lets_anything_behind_the_segments_into_them() -> None:
    """Those that are installed here; the whole tail is NaN."""
    lengths, tokens = [300, 41], 400
    qkv = tensors(tokens, head_dim=72, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x[:341].double() for x in qkv)
    exact = by_segment((q, k, v), lengths, None)
    for x in qkv:
        x[341:] = torch.nan
    shape = AttentionShape(tokens, 2, 300, qkv[0].shape[1], 72, torch.bfloat16, False)
    for name, kernel in choice._KERNELS.items():
        if kernel.serves(shape):
            output = kernel.run(*qkv, boundaries(lengths, device="cuda"), 300, None)[:341]
            torch.testing.assert_close(output.double(), exact, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_kernels_are_timed_on_the_device_that_they_run_on() -> None:
    """Another one is current: its stream knows nothing of them."""
    lengths = [512] * 8
    q, k, v = tensors(sum(lengths), head_dim=72, dtype=torch.bfloat16, device="cuda:1")
    table = boundaries(lengths, device="cuda:1")
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    choices: dict[AttentionShape, AttentionChoice] = {}
    with attending(frozenset({(len(lengths), 512)}), choices):
        output = varlen_attention(q, k, v, table, 512)
    assert_right(output, (q, k, v), lengths, None)
    (made,) = choices.values()
    assert {"flash", "dense"} <= set(made.milliseconds)
    assert all(ms > 0.002 for ms in made.milliseconds.values()), made.milliseconds
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before
