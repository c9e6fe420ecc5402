"""Compiling the blocks of a tower before it is captured.

A tower is the same block many times over. ``torch.compile`` of one block, with a symbolic number of
tokens, serves all blocks and all budgets: 7 s for Qwen2.5-VL's tower, where the whole tower took 30
and was no faster. The graph then holds fused kernels. Only captures see the compiled code; the
model that its user calls stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmgraph.graphs import in_region
from mmgraph.preparation.epilogues import Epilogues, compiled_with_epilogues
from mmgraph.preparation.reductions import rows_at_once

__all__ = ["compiled_blocks", "find_blocks"]

_MIN_BLOCKS = 2
_known_widths: set[tuple[torch.Size, ...]] = set()
"""Of all towers so far: Dynamo counts what it compiles by function, whoever calls it."""
_MAX_COMPILES = 6
"""Of blocks with the same widths, in one of the two ways."""


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a tower: members of one list and one class, outermost lists only."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for parent in module.modules():
        if id(parent) in inside or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in parent)
        repeated = [c for c in parent if kinds[type(c)] >= _MIN_BLOCKS and any(c.children())]
        blocks += repeated
        inside.update(id(m) for block in repeated for m in block.modules())
    return blocks


@contextmanager
def compiled_blocks(module: nn.Module, epilogues: Epilogues | None = None) -> Iterator[int]:
    """Within the block the blocks of `module` run compiled; gives how many they are.

    Args:
        module: The tower.
        epilogues: Where additions and gates may be in the products before them.
    """
    blocks = [b for b in find_blocks(module) if "forward" not in b.__dict__]
    compiled = _Compiled(epilogues)
    try:
        for block in blocks:
            block.__dict__["forward"] = compiled.forward(block)
        # Blocks that don't share code would be compiled one by one, for minutes: an error instead.
        ways = 1 if epilogues is None else 2
        _known_widths.update(map(_widths, blocks))
        limit = ways * _MAX_COMPILES * max(1, len(_known_widths))
        with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
            yield len(blocks)
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _widths(block: nn.Module) -> tuple[torch.Size, ...]:
    """What blocks of one class must have in common to share code: stages differ in width."""
    return tuple(parameter.shape for parameter in block.parameters())


class _Compiled:
    """Compiled code by function: to have it for each block anew takes some milliseconds each."""

    def __init__(self, epilogues: Epilogues | None) -> None:
        self._epilogues = epilogues
        self._by_function: dict[Any, tuple[Any, Any]] = {}

    def forward(self, block: nn.Module) -> Any:
        """What runs in place of the forward of `block`."""
        forward = block.forward
        function = getattr(forward, "__func__", None)
        if (
            function is None or getattr(forward, "__self__", None) is not block
        ):  # no method of its own
            apart, fused = self._compile(forward)
        else:
            if function not in self._by_function:
                self._by_function[function] = self._compile(function)
            apart, fused = (partial(way, block) for way in self._by_function[function])
        epilogues, kind = self._epilogues, (function or type(block), _widths(block))

        def fast(*args: Any, **kwargs: Any) -> Any:
            # Under a dispatch mode (the guard before a capture) the compiler gives up on the code
            # for good, and what the mode is there to see would be hidden from it anyway.
            if _get_current_dispatch_mode() is not None:
                return forward(*args, **kwargs)
            with rows_at_once():
                if epilogues is not None and epilogues.is_faster(kind, apart, fused, args, kwargs):
                    return fused(*args, **kwargs)
                return apart(*args, **kwargs)

        return lambda *args, **kwargs: in_region(forward, fast, args, kwargs)

    def _compile(self, function: Any) -> tuple[Any, Any]:
        """The function compiled in both ways; nothing is compiled before it is called."""
        apart = torch.compile(function, dynamic=True)
        return apart, apart if self._epilogues is None else compiled_with_epilogues(function)
