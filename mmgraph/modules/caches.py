"""What a tower keeps from one call to the next: its own for each graph.

Towers memoise tables: ``functools.lru_cache`` around the coordinates of DINOv3's patches, the
relative positions of BEiT, the position embeddings of SAM 3; others put them on ``self``. A graph
that reads such a table would read freed memory as soon as the cache drops it, and a table that was
made while a graph was recorded lies in the graph's memory, where the next replay of another graph
overwrites it under whoever finds it in the cache. So a capture runs with caches of its own, which
the graph keeps, and the tower's are afterwards as they were before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from mmgraph.graphs.trees import storage_of, tensors_in

__all__ = ["OwnCaches", "private_caches"]

_one_at_a_time = threading.RLock()
_Memo = type(functools.lru_cache(lambda: None))


class OwnCaches:
    """What was memoised while something was recorded, for as long as that may run."""

    def __init__(self) -> None:
        self._made: list[object] = []
        self._found: list[object] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the tables that were made, in bytes."""
        sizes = {storage_of(t): t.untyped_storage().nbytes() for t in tensors_in(self._made)}
        return sum(sizes.values())

    def instead_of(self, memo: Any) -> Callable[..., Any]:
        """The function of an ``lru_cache`` with an empty cache, from which nothing is dropped.

        Only this thread sees it: what is made while a graph is recorded holds nothing before its
        first replay, and isn't in order with another thread's stream.
        """
        function, values, thread = memo.__wrapped__, dict[Any, Any](), threading.get_ident()
        self._made.append(values)

        @functools.wraps(function)
        def memoised(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return memo(*args, **kwargs)
            key = (args, tuple(kwargs.items()))
            if key not in values:
                values[key] = function(*args, **kwargs)
            return values[key]

        return memoised

    def keep(self, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
        """Hold what a module had as attributes, and what it has got in their place."""
        self._found.append(before)
        self._made.append({n: t for n, t in after.items() if before.get(n) is not t})


@contextmanager
def private_caches(module: nn.Module) -> Iterator[OwnCaches]:
    """Within the block, the tower's functions have empty caches of their own.

    Yields:
        What they and the attributes of its submodules hold when the block ends, to be kept for as
        long as anything that was recorded within may run.
    """
    own = OwnCaches()
    with _one_at_a_time, ExitStack() as stack:
        for put, memo in _memos(module):
            put(own.instead_of(memo))
            stack.callback(put, memo)
        stack.enter_context(_own_attributes(module, own))
        yield own


@contextmanager
def _own_attributes(module: nn.Module, own: OwnCaches) -> Iterator[None]:
    """Put back the tensors that are plain attributes of submodules."""
    found = {id(m): (m, _tensors(m)) for m in module.modules()}
    try:
        yield
    finally:
        for submodule, before in found.values():
            after = _tensors(submodule)
            own.keep(before, after)
            for name in after.keys() - before.keys():
                delattr(submodule, name)
            for name, tensor in before.items():
                if after.get(name) is not tensor:
                    setattr(submodule, name, tensor)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: v for name, v in vars(module).items() if isinstance(v, torch.Tensor)}


def _memos(module: nn.Module) -> list[tuple[Callable[[Any], None], Any]]:
    """Each cached function that the modelling code of `module` defines, and how to replace it."""
    classes = {c for m in module.modules() for c in type(m).__mro__ if not issubclass(nn.Module, c)}
    found: list[tuple[Callable[[Any], None], Any]] = []
    for cls in classes:
        for name, value in vars(cls).items():
            found += _in_value(value, functools.partial(setattr, cls, name), cls.__module__)
    for name in {cls.__module__ for cls in classes}:
        source = sys.modules.get(name)
        for attribute, value in vars(source).items() if source is not None else ():
            found += _in_value(value, functools.partial(setattr, source, attribute), name)
    return list({id(memo): (put, memo) for put, memo in found}.values())


def _in_value(
    value: Any, put: Callable[[Any], None], module: str
) -> list[tuple[Callable[[Any], None], Any]]:
    if isinstance(value, (staticmethod, classmethod)):
        kind, inner = type(value), value.__func__
        return _in_value(inner, lambda memo: put(kind(memo)), module)
    if isinstance(value, _Memo):
        return [(put, value)] if value.__module__ == module else []
    if not isinstance(value, FunctionType) or value.__module__ != module:
        return []
    return [
        (functools.partial(setattr, cell, "cell_contents"), _contents(cell))
        for cell in value.__closure__ or ()
        if isinstance(_contents(cell), _Memo)
    ]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that isn't bound yet
        return None
