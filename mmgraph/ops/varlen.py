"""Attention over packed segments, without a host read and without a data-dependent shape.

Packed towers of transformers split by ``lengths.tolist()`` unless the name of their attention
implementation contains "flash"; only then do they pass on ``cu_seq_lens_q`` and ``max_length_q``.
One function is registered under such a name. On CUDA in half precision it is the kernel that
``choice.py`` finds fastest; elsewhere a gather into one padded row a segment, then dense attention.

Rows outside every segment: flash leaves them unwritten, the other path writes zeros. Whatever they
hold is in no row of a segment, and stays in them (every other operation of a packed tower works
on single rows or on the rows of one merge group).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from mmgraph.ops.choice import attend, dense_attention, is_uniform

__all__ = [
    "VARLEN_ATTENTION",
    "NoSegmentsError",
    "register_varlen_attention",
    "varlen_attention",
    "varlen_attention_reference",
]

VARLEN_ATTENTION = "mmgraph_flash_varlen"
"""The name under which transformers finds :func:`varlen_attention`."""

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256


class NoSegmentsError(ValueError):
    """A tower calls :data:`VARLEN_ATTENTION` without segments."""


def varlen_attention(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend within each of the segments [cu_seqlens[s], cu_seqlens[s + 1]), in both directions.

    Args:
        query_THK: Queries (T, H, K).
        key_THK: Keys (T, H, K).
        value_THK: Values (T, H, K).
        cu_seqlens: Boundaries (S + 1,), int32, on their device; equal ones are empty segments.
        max_seqlen: An upper bound on the longest segment.
        scale: Factor of the logits; 1/sqrt(K) if ``None``.

    Returns:
        (T, H, K). Rows outside every segment are undefined.
    """
    output: torch.Tensor = torch.ops.mmgraph.varlen_attention(
        query_THK, key_THK, value_THK, cu_seqlens, max_seqlen, scale
    )
    return output


# An operator, so that compiled code leaves the choice of a kernel to the moment of the call.
@torch.library.custom_op(
    "mmgraph::varlen_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, "
    "float? scale) -> Tensor",
)
def _varlen_attention(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    head_dim = query_THK.shape[-1]
    arguments = (query_THK, key_THK, value_THK, cu_seqlens, max_seqlen, scale)
    if (
        query_THK.device.type == "cuda"
        and query_THK.dtype in _FLASH_DTYPES
        and head_dim <= _FLASH_MAX_HEAD_DIM
        and head_dim % 8 == 0
    ):
        output_THK = attend(*arguments)
    elif is_uniform(cu_seqlens, max_seqlen):
        output_THK = dense_attention(query_THK, key_THK, value_THK, max_seqlen, scale)
    else:
        output_THK = varlen_attention_reference(*arguments)
    return output_THK.contiguous()  # which is what compiled code expects


@_varlen_attention.register_fake
def _(query_THK: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query_THK, memory_format=torch.contiguous_format)


def varlen_attention_reference(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Like :func:`varlen_attention` for any device and dtype; rows outside segments are zero.

    Segments are gathered into (S, H, max_seqlen, K). Values from beyond a segment are replaced,
    not multiplied by zero, so that a NaN of one segment can't reach another.
    """
    num_tokens = query_THK.shape[0]
    starts_S, ends_S = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    offsets_L = torch.arange(max_seqlen, device=query_THK.device)
    rows_SL = starts_S[:, None] + offsets_L
    valid_SL = rows_SL < ends_S[:, None]
    rows_SL = rows_SL.clamp(max=num_tokens - 1)

    def gather(x_THK: torch.Tensor) -> torch.Tensor:
        x_SLHK = x_THK[rows_SL].masked_fill(~valid_SL[:, :, None, None], 0)
        return x_SLHK.transpose(1, 2)

    # A row of an empty segment attends to everything, so that softmax has something to sum.
    mask_SL = valid_SL | ~valid_SL.any(dim=1, keepdim=True)
    out_SHLK = F.scaled_dot_product_attention(
        gather(query_THK),
        gather(key_THK),
        gather(value_THK),
        attn_mask=mask_SL[:, None, None, :],
        scale=scale,
    )
    tokens_T = torch.arange(num_tokens, device=query_THK.device)
    segment_T = (tokens_T[:, None] >= ends_S).sum(dim=1)
    inside_T = segment_T < ends_S.shape[0]
    segment_T = segment_T.clamp(max=ends_S.shape[0] - 1)
    offset_T = (tokens_T - starts_S[segment_T]).clamp(0, max_seqlen - 1)
    out_THK = out_SHLK.transpose(1, 2)[segment_T, offset_T]
    return out_THK.masked_fill(~inside_T[:, None, None], 0)


def _attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Adapt to transformers' ``AttentionInterface``: (1, H, T, K) in, (1, T, H, K) out."""
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise NoSegmentsError(
            f"{VARLEN_ATTENTION} attends within segments only: it needs cu_seq_lens_q and "
            "max_length_q, and takes no attention mask"
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    query_THK, key_THK, value_THK = (x[0].transpose(0, 1) for x in (query, key, value))
    output_THK = varlen_attention(
        query_THK, key_THK, value_THK, cu_seq_lens_q, max_length_q, scaling
    )
    return output_THK.unsqueeze(0), None


def register_varlen_attention() -> None:
    """Make :data:`VARLEN_ATTENTION` known to transformers; doing so twice changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN_ATTENTION, _attention_interface)
