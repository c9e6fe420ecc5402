"""Memory that holds parameters as views, with room between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

__all__ = ["Storage", "is_plain_linear", "move_into", "release"]


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that multiplies plain numbers, and does nothing else.

    Quantised or sharded parameters are tensors of other classes, whose numbers lie elsewhere. And
    a layer with a forward of its own (accelerate's hooks) isn't altered by another class.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return all(type(p) is nn.Parameter and p.is_floating_point() for p in module.parameters())


@dataclass(eq=False)
class Storage:
    """Zero-filled memory, and how many towers use it."""

    tensor: torch.Tensor
    users: int = 0

    def holds(self, parameter: torch.Tensor, start: int) -> bool:
        """Whether `parameter` is the view that begins at row `start`."""
        address = self.tensor.data_ptr() + start * self.tensor.stride(0) * self.tensor.itemsize
        return parameter.data_ptr() == address and parameter.dtype == self.tensor.dtype


_storages: WeakValueDictionary[int, Storage] = WeakValueDictionary()
"""Memory that is in use, by address."""


def move_into(
    parameters: Sequence[torch.Tensor | None], starts: Sequence[int], shape: tuple[int, ...]
) -> Storage:
    """Make parameters views of one larger tensor, each from its row on, and return that.

    Parameters that two towers share may be such views already.
    """
    views = [(p, start) for p, start in zip(parameters, starts, strict=True) if p is not None]
    first, begin = views[0]
    offset = begin * first.stride(0) * first.itemsize
    storage = _storages.get(first.data_ptr() - offset)
    known = storage is not None and storage.tensor.shape == shape
    if storage is None or not known or not all(storage.holds(p, start) for p, start in views):
        with torch.inference_mode(False), torch.no_grad():  # in this order
            tensor = torch.zeros(shape, dtype=first.dtype, device=first.device)
            for parameter, start in views:
                view = tensor.narrow(0, start, parameter.shape[0])
                if view.dim() > 1:
                    view = view.narrow(1, 0, parameter.shape[1])
                view.copy_(parameter)
                parameter.data = view
        storage = _storages[tensor.data_ptr()] = Storage(tensor)
    storage.users += 1
    return storage


def release(
    parameters: Sequence[torch.Tensor | None], starts: Sequence[int], storage: Storage
) -> None:
    """Give parameters memory of their own size again, once no tower needs the other."""
    storage.users -= 1
    if storage.users:
        return
    with torch.inference_mode(False), torch.no_grad():  # in this order
        for parameter, start in zip(parameters, starts, strict=True):
            if parameter is not None and storage.holds(parameter, start):  # or it was replaced
                with suppress(torch.OutOfMemoryError):  # then it stays a view of the same numbers
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
