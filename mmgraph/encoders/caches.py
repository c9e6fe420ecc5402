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

__all__ = ["private_caches"]

_one_at_a_time = threading.RLock()
_Memo = type(functools.lru_cache(lambda: None))


@contextmanager
def private_caches(module: nn.Module) -> Iterator[list[object]]:
    """Within the block, the tower's functions have empty caches of their own.

    Yields:
        What they and the attributes of its submodules hold when the block ends, to be kept for as
        long as anything that was recorded within may run.
    """
    kept: list[object] = []
    with _one_at_a_time, ExitStack() as stack:
        for put, memo in _memos(module):
            private = _private(memo)
            kept.append(private)
            put(private)
            stack.callback(put, memo)
        stack.enter_context(_own_attributes(module, kept))
        yield kept


def _private(memo: Any) -> Any:
    """The same function with an empty cache, from which nothing is dropped."""
    typed = memo.cache_parameters()["typed"]
    return functools.lru_cache(maxsize=None, typed=typed)(memo.__wrapped__)


@contextmanager
def _own_attributes(module: nn.Module, kept: list[object]) -> Iterator[None]:
    """Put back the tensors that are plain attributes of submodules."""
    before = {id(m): (m, _tensors(m)) for m in module.modules()}
    try:
        yield
    finally:
        for submodule, tensors in before.values():
            after = _tensors(submodule)
            if after:
                kept.append(after)
            if tensors:
                kept.append(tensors)
            for name in after.keys() - tensors.keys():
                delattr(submodule, name)
            for name, tensor in tensors.items():
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
