"""Kernels and functions that encoders are run with inside a graph."""

from mmgraph.ops.choice import AttentionChoice, AttentionShape, attending
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
    "attending",
    "linear_gelu",
    "register_varlen_attention",
    "varlen_attention",
    "varlen_attention_reference",
]
