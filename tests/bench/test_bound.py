from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mmgraph.bench import attention as attention_module
from mmgraph.bench import bound as bound_module
from mmgraph.bench.attention import CANDIDATES, Segments, fastest_attention
from mmgraph.bench.bound import aligned, measure_bound
from mmgraph.bench.recording import record
from mmgraph.bench.workload import Attention, Matmul, Product, Workload

CPU = torch.device("cpu")
FLOAT = torch.float32


def attention(*lengths: int, **changes: Any) -> Attention:
    fields = {"keys": lengths, "heads": 2, "key_heads": 2, "head_dim": 8, "value_dim": 8}
    return Attention(**{"queries": lengths, "dtype": FLOAT, **fields, **changes})


@pytest.mark.parametrize(
    ("size", "element_size", "expected"),
    [
        (1280, 2, 1280),
        (3420, 2, 3456),  # Qwen2.5-VL's MLP
        (588, 2, 640),  # patches of 14 x 14 in colour
        (3420, 4, 3420),  # whole 16 bytes in float32
    ],
)
def test_widths_are_padded_as_mmgraph_pads_them(
    size: int, element_size: int, expected: int
) -> None:
    assert aligned(size, element_size) == expected


def performed(*operations: Product | Matmul | Attention) -> list[Any]:
    """What the bound of some operations does when it is called."""
    return list(record(measure_bound(Workload(operations), CPU).call).operations)


def test_the_bound_does_the_work_on_the_layers_own_weights() -> None:
    weights, matmul = [torch.randn(12, 8) for _ in range(2)], Matmul((2, 4, 8), (2, 8, 4), FLOAT)
    *products, product = performed(Product(10, (weights[0],)), Product(20, (weights[1],)), matmul)
    assert [op.rows for op in products] == [10, 20]
    assert [op.weights[0].data_ptr() for op in products] == [w.data_ptr() for w in weights]
    assert product == matmul


def test_the_bound_attends_with_the_fastest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    candidates = {name: lambda *_, name=name: lambda: log.append(name) for name in "ab"}
    times = iter([2.0, 1.0])
    monkeypatch.setattr(attention_module, "CANDIDATES", candidates)
    monkeypatch.setattr(attention_module, "microseconds", lambda *_: next(times))
    bound = measure_bound(Workload((attention(4), attention(4))), CPU)
    assert not log
    bound.call()
    assert log == ["b", "b"]
    assert bound.facts.attention[0].fastest == "b"


def test_a_weight_of_odd_widths_is_padded_with_zeros() -> None:
    weight = torch.randn(5, 3)
    (product,) = performed(Product(10, (weight,)))
    (padded,) = product.weights
    assert product.rows == 10
    assert torch.equal(padded[:5, :3], weight)
    assert tuple(padded.shape) == (64, 64)
    assert padded.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("faster", ["together", "apart"])
def test_products_of_one_input_are_one_where_that_is_faster(
    faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 2.0] if faster == "together" else [2.0, 1.0])
    monkeypatch.setattr(bound_module, "microseconds", lambda *_: next(times))
    weights = torch.randn(16, 8), torch.randn(12, 8)
    operations = (Product(10, weights), Product(10, weights))  # measured once
    bound = measure_bound(Workload(operations), CPU)
    made = [w for op in record(bound.call).operations for w in op.weights]  # type: ignore[union-attr]
    if faster == "together":
        assert [w.shape[0] for w in made] == [28, 28]
        assert torch.equal(made[0], torch.cat(weights))
    else:
        assert [w.shape[0] for w in made] == [16, 12, 16, 12]
    assert (bound.facts.products, bound.facts.products_run) == (4, len(made))
    assert bound.facts.product_flops == 2 * (2 * 10 * 8 * 28)


def test_a_product_takes_the_kernel_that_is_faster_for_its_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[int, ...]] = []

    def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ran.append(tuple(weight.shape))
        return x @ weight.t()

    times = iter([2.0, 1.0, 1.0, 2.0, 2.0, 1.0])  # cuBLAS's first, once a shape
    monkeypatch.setattr(bound_module, "microseconds", lambda *_: next(times))
    monkeypatch.setattr(bound_module, "other_product", lambda _: other)
    shapes = [(16, 8), (24, 8), (16, 8), (16, 9)]
    weights = [torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes]
    weights.append(torch.randn(32, 8))  # not of 16 bits
    bound = measure_bound(Workload(tuple(Product(10, (w,)) for w in weights)), CPU)
    ran.clear()
    bound.call()
    assert ran == [(16, 8), (16, 8), (16, 64)]  # the last one is padded
    assert bound.facts.products_other == 3


def test_operations_are_counted_by_the_towers_own_widths() -> None:
    operations = (Product(10, (torch.randn(5, 3),)), attention(4, 6), attention(4, 6))
    facts = measure_bound(Workload(operations), CPU).facts
    assert facts.products == 1
    assert facts.product_flops == 2 * 10 * 5 * 3
    assert facts.attention_flops == 2 * (4 * (16 + 36) * 2 * 8)
    assert facts.flops == facts.product_flops + facts.attention_flops
    (times,) = facts.attention  # measured once, called twice
    assert (times.calls, times.flops) == (2, facts.attention_flops // 2)
    assert times.shape == "1 x 4 + 1 x 6 rows, 2 heads of 8"
    assert times.fastest in times.microseconds


def test_kernels_that_cannot_do_it_are_noted() -> None:
    fastest = fastest_attention(attention(4, 6), CPU)
    assert fastest.microseconds.keys() == {"segments, flash", "segments, mmgraph's choice"}
    assert fastest.failed.keys() == CANDIDATES.keys() - fastest.microseconds.keys()
    assert "different lengths" in fastest.failed["dense, cuDNN"]
    equal = fastest_attention(attention(4, 4), CPU)
    assert "dense, PyTorch's choice" in equal.microseconds
    assert "RuntimeError" in equal.failed["dense, cuDNN"]


@pytest.mark.parametrize(
    "changes",
    [{"keys": (9, 9)}, {"key_heads": 1}, {"causal": True}, {"mask": ((4, 4), torch.bool)}],
)
def test_what_only_dense_kernels_do_is_left_to_them(changes: dict[str, Any]) -> None:
    fastest = fastest_attention(attention(4, 4, **changes), CPU)
    assert "dense, PyTorch's choice" in fastest.microseconds
    assert "ValueError" in fastest.failed["segments, flash"]


def test_candidates_compute_the_same_attention() -> None:
    wanted = attention(4, 4, 4, scale=0.3)
    segments = Segments.random(wanted, CPU)
    runs = {
        name: CANDIDATES[name](wanted, segments) for name in ("dense, flash", "segments, flash")
    }
    dense_SHLK, packed_THK = (run() for run in runs.values())
    torch.testing.assert_close(dense_SHLK.transpose(1, 2).reshape(packed_THK.shape), packed_THK)
    q, k, v = (
        x[4:8].transpose(0, 1) for x in (segments.query_THK, segments.key_THK, segments.value_THK)
    )
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(packed_THK[4:8].transpose(0, 1), expected)


def test_without_any_kernel_the_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(attention_module, "CANDIDATES", {"broken": broken})
    with pytest.raises(RuntimeError, match="none left"):
        fastest_attention(attention(4), CPU)
