"""A matrix product with its activation."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["linear_gelu"]

_HALF = (torch.float16, torch.bfloat16)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU of ``F.linear(x, weight, bias)``.

    On CUDA in half precision cuBLAS applies it to its float32 accumulators, so that what GELU reads
    isn't rounded first.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,).

    Returns:
        (..., O).
    """
    output: torch.Tensor = torch.ops.mmgraph.linear_gelu(x, weight, bias)
    return output


# An operator of its own: the compiler would take PyTorch's apart again.
@torch.library.custom_op(
    "mmgraph::linear_gelu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
)
def _linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cuda" or x.dtype not in _HALF or x.numel() == 0:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh").contiguous()
    rows = x.reshape(-1, x.shape[-1])
    product = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return product.view(*x.shape[:-1], weight.shape[0])


@_linear_gelu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
