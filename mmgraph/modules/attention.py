"""Which function of transformers a tower attends with: its configs name it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mmgraph.ops import register_varlen_attention

__all__ = [
    "attends_by_segments",
    "attention_configs",
    "attention_implementation",
    "use_attention_implementation",
]

_SEGMENTS = "cu_seqlens"


def attends_by_segments(module: nn.Module) -> bool:
    """Whether layers of `module` are told where segments begin, as flash attention wants it.

    With any other function transformers calls that for one segment after another.
    """
    return any(map(_takes_segments, {type(m) for m in module.modules()}))


def _takes_segments(kind: type[nn.Module]) -> bool:
    try:
        return _SEGMENTS in inspect.signature(kind.forward).parameters
    except (AttributeError, TypeError, ValueError):  # a scripted module, say
        return False


@contextmanager
def attention_implementation(module: nn.Module, name: str) -> Iterator[None]:
    """Like :func:`use_attention_implementation`, within the block."""
    before = [(c, c._attn_implementation_internal) for c in attention_configs(module)]
    try:
        use_attention_implementation(module, name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def use_attention_implementation(module: nn.Module, name: str) -> None:
    """Let every config in `module` name the attention function `name`, for good."""
    register_varlen_attention()
    for config in attention_configs(module):
        config._attn_implementation_internal = name


def attention_configs(module: nn.Module) -> list[Any]:
    """The configs in `module` that name an attention function; each once."""
    found: Iterator[Any] = (getattr(m, "config", None) for m in module.modules())
    return list({id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}.values())
