"""Matrix products that end with what would be a kernel of its own: an addition, or a gate.

The kernels are those of quack (quack-kernels), which flash-attn-4 brings along: the product's
accumulators get the bias, and the rows that they are added to, or the gate that they make, before
they are rounded and written. cuBLAS can add a bias or rows, but PyTorch can't ask it for both, and
it knows no gate. On an H200, for 9,216 rows of Qwen2.5-VL-7B's MLP, the product with its addition
takes what cuBLAS takes for the product alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from mmgraph.log import get_logger
from mmgraph.ops.compare import is_off

__all__ = [
    "WrongProductError",
    "can_add",
    "can_gate",
    "checked",
    "is_aligned",
    "linear_add",
    "linear_swiglu",
    "other_product",
]

_logger = get_logger(__name__)
_HALF = (torch.float16, torch.bfloat16)
_HOPPER = (9, 0)
_ALIGNED = 8  # elements of 16 bits, as what is loaded at once has 16 bytes
_ALIGNED_BYTES = 16
_checked: ContextVar[list[str] | None] = ContextVar("mmgraph_checked_products", default=None)


class WrongProductError(Exception):
    """A kernel's result isn't what it should be."""


@contextmanager
def checked() -> Iterator[list[str]]:
    """Within the block each product is also computed for random inputs, and compared.

    Not for its own inputs: rows of no segment hold whatever was in memory. Gives the names of the
    products that were asked for, as they come.

    Raises:
        WrongProductError: It differs by more than rounding, from the operator that is called.
    """
    seen: list[str] = []
    token = _checked.set(seen)
    try:
        yield seen
    finally:
        _checked.reset(token)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """Return ``rows + F.linear(x, weight, bias)``, rounded once.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,).
        rows: (..., O).

    Returns:
        (..., O).
    """
    output: torch.Tensor = torch.ops.mmgraph.linear_add(x, weight, bias, rows)
    return output


def linear_swiglu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``silu(g) * u`` for the halves g, u of ``F.linear(x, weight, bias)``, rounded once.

    Args:
        x: (..., I).
        weight: (2 O, I), the gate's rows first.
        bias: (2 O,).

    Returns:
        (..., O).
    """
    output: torch.Tensor = torch.ops.mmgraph.linear_swiglu(x, weight, bias)
    return output


def can_add(device: torch.device) -> bool:
    """Whether products end with additions on `device`."""
    return device.type == "cuda" and _is_hopper(device) and _add_kernel() is not None


def can_gate(device: torch.device) -> bool:
    """Whether products end with gates on `device`."""
    return device.type == "cuda" and _is_hopper(device) and _gate_kernel() is not None


def other_product(
    device: torch.device,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """What multiplies x (R, I) by the weight (O, I) of a layer besides cuBLAS, if there is any."""
    if not can_add(device):
        return None
    gemm = _of_quack("gemm")
    return lambda x, weight: gemm(x, weight.t(), tuned=False)


def is_aligned(*widths: int) -> bool:
    """Whether the kernels take matrices of these widths."""
    return not any(width % _ALIGNED for width in widths)


# Operators of their own: the compiler would look into the kernels otherwise.
@torch.library.custom_op(
    "mmgraph::linear_add",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor rows) -> Tensor",
)
def _linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    def ours(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _add_kernel()(
            _matrix(x), weight.t(), _matrix(rows), out=_matrix(output), bias=bias, tuned=False
        )
        return output

    def plain(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (rows + F.linear(x, weight, bias)).contiguous()

    return _run("add", ours, plain, (x, rows), (weight, bias), can_add(x.device))


@_linear_add.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "mmgraph::linear_swiglu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def _linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    def ours(x: torch.Tensor) -> torch.Tensor:
        output = x.new_empty((*x.shape[:-1], weight.shape[0] // 2))
        # The kernel makes neighbours of a gate's weights and those of what it gates, and wants
        # the biases like that.
        paired = None if bias is None else bias.unflatten(0, (2, -1)).t().flatten()
        _gate_kernel()(
            _matrix(x),
            weight.t(),
            bias=paired,
            activation="swiglu",
            postact_out=_matrix(output),
            store_preact=False,
            tuned=False,
            concat_layout=("B",),
        )
        return output

    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        return (F.silu(gate) * up).contiguous()

    return _run("gate", ours, plain, (x,), (weight, bias), can_gate(x.device))


@_linear_swiglu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _run(
    name: str,
    ours: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor | None],
    has_kernel: bool,
) -> torch.Tensor:
    """Call `ours`, or `plain` where the kernel isn't there or doesn't take the inputs."""
    x, seen = inputs[0], _checked.get()
    if seen is not None:
        seen.append(name)
    inputs = [tensor.contiguous() for tensor in inputs]
    fits = x.dtype in _HALF and x.numel() and _all_aligned(*inputs, *parameters)
    if not (has_kernel and fits):
        return plain(*inputs)
    # The device need not be the current one, where kernels of other packages would be launched.
    with torch.cuda.device(x.device):
        if seen is not None:
            generator = torch.Generator(x.device).manual_seed(0)
            random = [torch.empty_like(tensor).normal_(generator=generator) for tensor in inputs]
            if is_off(ours(*random), plain(*random), each_row=True):
                raise WrongProductError("the result of a product is wrong")
        return ours(*inputs)


def _all_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all begin where whole vectors can be loaded from."""
    return not any(t.data_ptr() % _ALIGNED_BYTES for t in tensors if t is not None)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Contiguous `x` as rows."""
    return x.view(-1, x.shape[-1])


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Whether this is the chip on which the kernels were tried."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == _HOPPER


@lru_cache(maxsize=1)
def _add_kernel() -> Any:
    return _of_quack("gemm_add")


@lru_cache(maxsize=1)
def _gate_kernel() -> Any:
    # Its kernels are built from this module, which other packages can be too new for.
    return _of_quack("gemm_gated", needs="quack.epilogue.library")


def _of_quack(name: str, needs: str = "quack") -> Any:
    """A function of quack; ``None`` without quack or, with a warning, where it can't be used."""
    if importlib.util.find_spec("quack") is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(needs)
            return getattr(importlib.import_module("quack.gemm_interface"), name)
    except Exception as error:  # the packages that it finds aren't those that it wants, say
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        _logger.warning("quack is installed, but %s can't be used: %s", name, why)
        return None
