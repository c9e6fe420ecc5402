"""Matrix products that end with what would be a kernel of its own: an addition, or a gate.

The kernels are those of quack (quack-kernels), which flash-attn-4 brings along: the product's
accumulators get the bias, and the rows that they are added to, or the gate that they make, before
they are rounded and written. cuBLAS can add a bias or rows, but PyTorch can't ask it for both, and
it knows no gate. On an H200, for 9,216 rows of Qwen2.5-VL-7B's MLP, the product with its addition
takes what cuBLAS takes for the product alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["can_add", "can_gate", "is_aligned", "linear_add", "linear_swiglu"]

_HALF = (torch.float16, torch.bfloat16)
_HOPPER = (9, 0)
_ALIGNED = 8  # elements of 16 bits, as what is loaded at once has 16 bytes


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
    if x.dtype not in _HALF or x.numel() == 0 or not can_add(x.device):
        return rows + F.linear(x, weight, bias)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    with torch.cuda.device(x.device):
        _add_kernel()(
            _matrix(x), weight.t(), _matrix(rows), out=_matrix(output), bias=bias, tuned=False
        )
    return output


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
    if x.dtype not in _HALF or x.numel() == 0 or not can_gate(x.device):
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        return F.silu(gate) * up
    output = x.new_empty((*x.shape[:-1], weight.shape[0] // 2))
    if bias is not None:  # the kernel makes neighbours of the weights of a gate, not of the biases
        bias = bias.unflatten(0, (2, -1)).t().flatten()
    with torch.cuda.device(x.device):
        _gate_kernel()(
            _matrix(x),
            weight.t(),
            bias=bias,
            activation="swiglu",
            postact_out=_matrix(output),
            store_preact=False,
            tuned=False,
            concat_layout=("B",),
        )
    return output


@_linear_swiglu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """`x` as rows, each of which lies together."""
    return x.reshape(-1, x.shape[-1]).contiguous()


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Whether this is the chip on which the kernels were tried."""
    return torch.cuda.get_device_capability(device) == _HOPPER


@lru_cache(maxsize=1)
def _add_kernel() -> Any:
    try:
        from quack.gemm_interface import gemm_add
    except Exception:  # not there, or not with the packages that it finds
        return None
    return gemm_add


@lru_cache(maxsize=1)
def _gate_kernel() -> Any:
    try:
        import quack.epilogue.library  # noqa: F401  (quack 0.6.5 and nvidia-cutlass-dsl 4.8 clash)
        from quack.gemm_interface import gemm_gated
    except Exception:  # likewise
        return None
    return gemm_gated
