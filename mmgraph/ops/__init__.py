"""Kernels and functions that encoders are run with inside a graph."""

from mmgraph.ops.choice import AttentionChoice, AttentionShape, attending
from mmgraph.ops.compare import milliseconds
from mmgraph.ops.epilogues import (
    WrongProductError,
    can_add,
    can_gate,
    checked,
    is_aligned,
    linear_add,
    linear_swiglu,
    other_product,
)
from mmgraph.ops.linear import linear_gelu
from mmgraph.ops.varlen import (
    VARLEN_ATTENTION,
    NoSegmentsError,
    register_varlen_attention,
    varlen_attention,
    varlen_attention_reference,
)

__all__ = [
    "VARLEN_ATTENTION",
    "AttentionChoice",
    "AttentionShape",
    "NoSegmentsError",
    "WrongProductError",
    "attending",
    "can_add",
    "can_gate",
    "checked",
    "is_aligned",
    "linear_add",
    "linear_gelu",
    "linear_swiglu",
    "milliseconds",
    "other_product",
    "register_varlen_attention",
    "varlen_attention",
    "varlen_attention_reference",
]
