"""Arguments that a forward takes and never looks at.

Whisper's encoder takes an attention mask "for compatibility". When it transcribes long sounds, that
is the mask of whole sounds, with a row for each that the call began with. As a part of the call it
would give every length graphs of its own, and none to a batch from which a sound is gone.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

__all__ = ["unread_parameters"]

_ASSIGNMENTS = frozenset({"STORE_FAST", "STORE_FAST_STORE_FAST"})
_READS_ALL = frozenset({"locals", "vars", "eval", "exec", "_getframe"})


def unread_parameters(module: nn.Module, method: str) -> frozenset[str]:
    """Parameters of a method of `module` that may be left out, and whose values can't matter to it.

    Only the innermost function is looked at. Decorators read switches such as `return_dict`, so
    this holds for tensors alone.
    """
    if method in module.__dict__:  # somebody's own forward: what it reads is its business
        return frozenset()
    function = inspect.unwrap(getattr(type(module), method))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return frozenset()
    read = set(_names_read(code))
    if not read.isdisjoint(_READS_ALL):
        return frozenset()
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.default is not p.empty and p.name not in read)


def _names_read(code: CodeType) -> Iterator[str]:
    """Names with which a function, or one within it, does anything but assign to them."""
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _ASSIGNMENTS:
            value = instruction.argval
            yield from value if isinstance(value, tuple) else (value,)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_read(constant)
