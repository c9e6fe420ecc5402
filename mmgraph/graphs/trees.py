"""Structures of tensors, such as a model's output, taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch
from torch.utils import _pytree as pytree

from mmgraph.errors import CaptureError

__all__ = ["Rebuild", "fields_of", "flatten", "reordered", "storage_of", "tensors_in"]

Rebuild = Callable[[list[torch.Tensor]], Any]
"""Puts tensors back into the structure that they were taken from."""


def flatten(tree: Any) -> tuple[list[torch.Tensor], Rebuild]:
    """Return the tensors of `tree` and a function that puts others in their places.

    Raises:
        CaptureError: There are tensors in something that isn't taken apart.
    """
    fields = fields_of(tree)
    leaves, structure = pytree.tree_flatten(tree)
    hidden = next(filter(_hides_tensors, leaves), None)
    if hidden is not None:
        raise CaptureError(
            f"tensors in a {type(hidden).__name__} can't be followed: return tuples, dicts or a "
            "class that torch.utils._pytree knows"
        )
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: list[torch.Tensor]) -> Any:
        values = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return reordered(pytree.tree_unflatten(values, structure), fields)

    return [leaves[i] for i in places], rebuild


def _hides_tensors(leaf: Any) -> bool:
    """Whether something that isn't taken apart holds tensors, or in a list what holds some."""
    parts = [] if isinstance(leaf, torch.Tensor) else list(getattr(leaf, "__dict__", {}).values())
    for part in tuple(parts):
        parts += part if isinstance(part, list) else ()
    return any(tensors_in([part, list(getattr(part, "__dict__", {}).values())]) for part in parts)


def fields_of(tree: Any) -> tuple[str, ...]:
    """The fields of an output of transformers in their order, which indexing by number goes by."""
    return tuple(tree) if isinstance(tree, OrderedDict) else ()


def reordered(tree: Any, fields: tuple[str, ...]) -> Any:
    """Bring `fields` into their order again: made anew, an output has that of its class."""
    for field in fields:
        tree.move_to_end(field)
    return tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of `tree`, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """What the views of one memory have in common; it names the memory while one of them lives."""
    while _functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.vmap
        tensor = _functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)
