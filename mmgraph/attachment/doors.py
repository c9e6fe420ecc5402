"""Ways into a tower besides the ones that it is usually called by.

timm's models hand out what their blocks return through methods of their own, which don't go through
forward or forward_features. A graph of one is captured when it is first called, never up front:
what is asked for (which blocks, normalised or not, in which format) is part of its key, and a
ladder for each of these methods would cost its time and memory for nothing.
"""

from __future__ import annotations

from mmgraph.encoders import Tower

__all__ = ["all_methods", "is_usual"]

_FURTHER_METHODS = ("forward_intermediates", "get_intermediate_layers")


def all_methods(tower: Tower) -> tuple[str, ...]:
    """The methods of `tower` that are wrapped: the usual ones, and those that give intermediates.

    All of them take the same first argument.
    """
    kind = type(tower.module)
    return (*tower.methods, *(method for method in _FURTHER_METHODS if hasattr(kind, method)))


def is_usual(tower: Tower, method: str) -> bool:
    """Whether graphs of `method` are worth capturing before it was called."""
    return method in tower.methods
