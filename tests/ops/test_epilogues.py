"""Products that end with an addition or a gate: the same numbers, rounded once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mmgraph.ops import (
    WrongProductError,
    can_add,
    can_gate,
    checked,
    is_aligned,
    linear_add,
    linear_swiglu,
)
from mmgraph.ops import epilogues as module

CPU = torch.device("cpu")
needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="quack isn't installed")


def product(
    rows: int, width: int, out: int, device: torch.device, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(out, width, device=device, dtype=torch.bfloat16) / width**0.5
    return x, weight, torch.randn(out, device=device, dtype=torch.bfloat16) if bias else None


def added(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    return rows + F.linear(x, weight, bias)


def gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return F.silu(gate) * up


def error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return float((output.double() - exact).norm() / exact.norm())


def doubled(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
def test_elsewhere_they_are_what_they_stand_for(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = product(1, 16, 32, CPU, bias=bias)
    x = torch.randn(*shape, 16, dtype=torch.bfloat16)
    rows = torch.randn(*shape, 32, dtype=torch.bfloat16)
    assert torch.equal(linear_add(x, weight, b, rows), added(x, weight, b, rows))
    assert torch.equal(linear_swiglu(x, weight, b), gated(x, weight, b))


@pytest.mark.parametrize("bias", [True, False])
def test_they_are_operators_that_a_compiler_may_see(bias: bool) -> None:
    x, weight, b = product(6, 16, 32, CPU, bias=bias)
    rows = torch.randn(6, 32, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.mmgraph.linear_add.default, (x, weight, b, rows))
    torch.library.opcheck(torch.ops.mmgraph.linear_swiglu.default, (x, weight, b))
    across = (x.t().contiguous().t(), weight, b, rows.t().contiguous().t())
    torch.library.opcheck(torch.ops.mmgraph.linear_add.default, across)
    torch.library.opcheck(torch.ops.mmgraph.linear_swiglu.default, across[:3])


def test_there_is_none_without_the_device_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_add(CPU)
    assert not can_gate(CPU)
    monkeypatch.setattr(module, "_is_hopper", lambda _: True)
    for asked, kernel in ((can_add, "_add_kernel"), (can_gate, "_gate_kernel")):
        monkeypatch.setattr(module, kernel, lambda: None)
        assert not asked(torch.device("cuda:0"))
        monkeypatch.setattr(module, kernel, lambda: print)
        assert asked(torch.device("cuda:0"))
    monkeypatch.setattr(module, "_is_hopper", lambda _: False)
    assert not can_add(torch.device("cuda:0"))
    assert not can_gate(torch.device("cuda:0"))


def test_a_quack_that_cant_be_used_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "quack"
    (package / "epilogue").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gemm_interface.py").write_text("def gemm_add(): ...\ndef gemm_gated(): ...\n")
    (package / "epilogue" / "__init__.py").touch()
    (package / "epilogue" / "library.py").write_text("raise TypeError('too new\\nfor it')\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_is_hopper", lambda _: True)
    for kernel in (module._add_kernel, module._gate_kernel):
        kernel.cache_clear()
    try:
        for _ in range(2):
            assert can_add(torch.device("cuda:0"))
            assert not can_gate(torch.device("cuda:0"))
        assert [record.getMessage() for record in caplog.records] == [
            "quack is installed, but gemm_gated can't be used: TypeError: too new"
        ]
    finally:
        for kernel in (module._add_kernel, module._gate_kernel):
            kernel.cache_clear()
        for name in [n for n in sys.modules if n.partition(".")[0] == "quack"]:
            del sys.modules[name]


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_kernel_that_is_wrong_is_found_whatever_it_gets(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Here with rows that aren't finite, on which nothing can be seen."""

    def add(x: Any, weight: Any, rows: Any, *, out: Any, bias: Any, tuned: bool) -> None:
        assert all(tensor.is_contiguous() for tensor in (x, rows, out))
        out.copy_((rows + x @ weight + bias) * factor)

    def gate(x: Any, weight: Any, *, bias: Any, postact_out: Any, **_: Any) -> None:
        assert all(tensor.is_contiguous() for tensor in (x, postact_out))
        halves = (x @ weight + bias.unflatten(0, (-1, 2)).t().flatten()).chunk(2, -1)
        postact_out.copy_(F.silu(halves[0]) * halves[1] * factor)

    monkeypatch.setattr(module, "_is_hopper", lambda _: True)
    monkeypatch.setattr(module, "_add_kernel", lambda: add)
    monkeypatch.setattr(module, "_gate_kernel", lambda: gate)
    monkeypatch.setattr(module, "can_add", lambda _: True)
    monkeypatch.setattr(module, "can_gate", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    x, weight, bias = product(6, 16, 32, CPU, bias=True)
    rows = torch.full((6, 32), torch.inf, dtype=torch.bfloat16)
    calls = [lambda: linear_add(x, weight, bias, rows), lambda: linear_swiglu(x, weight, bias)]
    state = torch.get_rng_state()
    across = rows.t().contiguous().t()
    calls.append(lambda: linear_add(x.t().contiguous().t(), weight, bias, across))
    calls.append(lambda: linear_swiglu(x.t().contiguous().t(), weight, bias))
    for call in calls:
        call()  # unnoticed
        with checked(), nullcontext() if factor == 1 else pytest.raises(WrongProductError):
            call()
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_have_to_be_whole_vectors() -> None:
    assert is_aligned(1280, 3424)
    assert not is_aligned(1280, 3420)


@pytest.mark.gpu
@needs_quack
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(3001, 1280, 1280), (2048, 4304, 1152), (7, 64, 128)]
)
def test_they_are_nearer_to_the_exact_numbers(rows: int, width: int, out: int, bias: bool) -> None:
    device = torch.device("cuda")
    assert can_add(device)
    assert can_gate(device)
    x, weight, b = product(rows, width, out, device, bias=bias)
    onto = 3 * torch.randn(rows, out, device=device, dtype=torch.bfloat16)
    cases: list[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[object, ...]]]
    cases = [(linear_add, added, (x, weight, b, onto)), (linear_swiglu, gated, (x, weight, b))]
    for ours, theirs, arguments in cases:
        exact = theirs(*doubled(*arguments))  # type: ignore[arg-type]
        assert error(ours(*arguments), exact) <= 1.01 * error(theirs(*arguments), exact)


@pytest.mark.gpu
@needs_quack
def test_a_graph_replays_them() -> None:
    device = torch.device("cuda")
    x, weight, bias = product(512, 256, 256, device, bias=True)
    rows = torch.randn(512, 256, device=device, dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return linear_add(x, weight, bias, rows), linear_swiglu(x, weight, bias)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for tensor in (x, weight, rows, bias):
        assert tensor is not None
        tensor.copy_(torch.randn_like(tensor) / 4)
    graph.replay()
    for output, expected in zip(outputs, run(), strict=True):
        assert torch.equal(output, expected)


def test_what_doesnt_begin_at_a_whole_vector_has_no_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it can't load that")

    monkeypatch.setattr(module, "can_add", lambda _: True)
    monkeypatch.setattr(module, "_add_kernel", lambda: never)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    x, weight, bias = product(6, 16, 32, CPU, bias=True)
    rows = torch.randn(6, 32, dtype=torch.bfloat16)
    moved = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight).copy_(weight)
    with checked() as seen:
        output = linear_add(x, moved, bias, rows)
    assert torch.equal(output, added(x, weight, bias, rows))
    assert seen == ["add"]
    with pytest.raises(AssertionError, match="can't load"):
        linear_add(x, weight, bias, rows)
