"""Watching one call of a tower, to know its workload.

What the call computes is of no interest, only which products it makes, of which sizes and with
which weights. A convolution is the product of its windows with its weights, a patch embedding that
of its patches. Grouped convolutions are left out, and of attention that isn't written as
``scaled_dot_product_attention`` only the two products are seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmgraph.bench.workload import Attention, Matmul, Operation, Product, Workload

__all__ = ["RECORDING_ATTENTION", "record", "register_recording_attention"]

RECORDING_ATTENTION = "mmgraph_bench_flash_recording"
"""Attention of transformers that is only watched; "flash" makes towers pass segments on."""


def record(call: Callable[[], Any]) -> Workload:
    """Run `call` once and return what it consists of."""
    recorder = _Recorder()
    token = _recorder.set(recorder)
    try:
        with recorder:
            call()
    finally:
        _recorder.reset(token)
    return Workload(tuple(recorder.operations))


def register_recording_attention() -> None:
    """Make :data:`RECORDING_ATTENTION` known to transformers; doing so twice changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(RECORDING_ATTENTION, _attention_interface)


class _Recorder(TorchFunctionMode):
    """Notes what is called; a composite function hides what it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._source: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        read = _READERS.get(func)
        if read is not None:
            source = args[0] if func is F.linear and args else None
            self.add(read(output, *args, **(kwargs or {})), source)
        return output

    def add(self, operations: Iterable[Operation], source: Any = None) -> None:
        """Note `operations`; `source` is the tensor that a linear layer takes.

        A layer that takes what the layer before took is one product with it, and attention right
        after attention more segments of the same.
        """
        same = source is not None and source is self._source
        self._source = source  # it is kept, or another tensor might come to its address
        for operation in operations:
            last = self.operations[-1] if self.operations else None
            joined: Operation | None = None
            if isinstance(last, Attention) and isinstance(operation, Attention):
                joined = last.joined(operation)
            elif same and isinstance(last, Product) and isinstance(operation, Product):
                joined = Product(last.rows, last.weights + operation.weights)
            if joined is None:
                self.operations.append(operation)
            else:
                self.operations[-1] = joined


_recorder: ContextVar[_Recorder] = ContextVar("mmgraph_bench_recorder")


def _linear(
    output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
) -> list[Operation]:
    return [Product(input.numel() // input.shape[-1], (weight,))]


def _convolution(
    output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
) -> list[Operation]:
    if input.shape[1 - weight.dim()] != weight.shape[1]:
        return []  # grouped
    return [Product(output.numel() // weight.shape[0], (weight.flatten(1),))]


def _matmul(
    output: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any
) -> list[Operation]:
    if min(left.dim(), right.dim()) < 2:
        return []  # a vector
    return [Matmul(tuple(left.shape), tuple(right.shape), left.dtype)]


def _dense_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> list[Operation]:
    count = math.prod(query.shape[:-3])
    attention = Attention(
        queries=(query.shape[-2],) * count,
        keys=(key.shape[-2],) * count,
        heads=query.shape[-3],
        key_heads=key.shape[-3],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        scale=scale,
        mask=None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype),
        causal=is_causal,
    )
    return [attention]


def _multi_head_attention(
    output: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    heads: int,
    in_proj_weight: torch.Tensor | None,
    *arguments: Any,
    **named: Any,
) -> list[Operation]:
    """PyTorch's ``nn.MultiheadAttention``: (L, B, E) with all projections inside."""
    if in_proj_weight is None:
        weights = [named[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        weights = list(in_proj_weight.chunk(3))
    batch = query.shape[1] if query.dim() == 3 else 1
    rows, key_rows = query.shape[0] * batch, key.shape[0] * batch
    attention = Attention(
        queries=(query.shape[0],) * batch,
        keys=(key.shape[0],) * batch,
        heads=heads,
        key_heads=heads,
        head_dim=embed_dim // heads,
        value_dim=embed_dim // heads,
        dtype=query.dtype,
    )
    out_proj_weight = arguments[5]  # after in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p
    inputs = (rows, key_rows, key_rows)
    projections = [Product(n, (weight,)) for n, weight in zip(inputs, weights, strict=True)]
    return [*projections, attention, Product(rows, (out_proj_weight,))]


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention as transformers calls it, (1, H, T, K) in; values come back as they are."""
    assert cu_seq_lens_q is not None, "a packed tower passes its segments to flash attention"
    lengths = tuple(n for n in cu_seq_lens_q.diff().tolist() if n)
    attention = Attention(
        queries=lengths,
        keys=lengths,
        heads=query.shape[1],
        key_heads=key.shape[1],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        scale=scaling,
    )
    _recorder.get().add([attention])
    output = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return output.transpose(1, 2), None


_READERS: dict[Any, Callable[..., list[Operation]]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
    **dict.fromkeys((torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm), _matmul),
    F.scaled_dot_product_attention: _dense_attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
