"""Whether somebody else looks at each operation of a call, or puts another in its place."""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

__all__ = ["is_traced"]


def is_traced() -> bool:
    """Whether the call is compiled, traced, transformed or seen by a dispatch mode.

    None of these would see the operations inside a graph.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
