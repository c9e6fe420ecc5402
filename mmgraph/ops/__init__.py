"""Kernels and functions that encoders are run with inside a graph."""

from mmgraph.ops.varlen import (
    VARLEN_ATTENTION,
    register_varlen_attention,
    varlen_attention,
    varlen_attention_reference,
)

__all__ = [
    "VARLEN_ATTENTION",
    "register_varlen_attention",
    "varlen_attention",
    "varlen_attention_reference",
]
