"""Calls of a tower's forward as data: arguments by name, and what of them a capture bakes in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mmgraph.types import Reason, Refusal

__all__ = ["CallSignature", "TowerCall", "TowerSignature"]

_NO_DEFAULT = object()
_NOT_OF_TOWERS = frozenset({"use_cache", "num_items_in_batch"})
"""What generate() of transformers 5.17 and the Trainer hand down to towers that take anything."""

TowerCall = Mapping[str, Any]
"""Arguments of one call of a tower, by name."""


class TowerSignature:
    """The parameters of a forward, read once so that binding a call costs a dict.

    Args:
        forward: The function of the class, which says more than what may stand in its place on
            an instance; its first parameter, self, is left out.
        main_input: The parameter with an entry for each row, if it isn't the first.

    Attributes:
        names: Parameters that may be given by position.
        main_input: The one whose rows are counted.
        foreign: Keywords that callers hand down though they mean nothing to a tower.
    """

    def __init__(self, forward: Callable[..., Any], main_input: str = "") -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        kinds = inspect.Parameter
        positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self.names = tuple(p.name for p in parameters if p.kind in positional)
        self.main_input = main_input or self.names[0]
        self.foreign = _NOT_OF_TOWERS.difference(self.names)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def is_default(self, name: str, value: Any) -> bool:
        """Whether giving `value` for the parameter `name` is the same as leaving it out."""
        if name in self.foreign:
            return True
        default = self._defaults.get(name, _NO_DEFAULT)
        return value is default or (type(value) is type(default) and value == default)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; only those that were given.

        Raises:
            Refusal: An argument too many or given twice; eager mode gives Python's error.
        """
        if not args:
            return kwargs
        if len(args) > len(self.names) or not kwargs.keys().isdisjoint(self.names[: len(args)]):
            raise Refusal(Reason.UNSUPPORTED_CALL)
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What a capture of a call bakes in besides its sizes.

    Attributes:
        tensors: Name, trailing shape and dtype of each tensor.
        constants: Name and frozen value of each other argument.
        flags: Values of the config's switches that change the outputs.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    constants: tuple[tuple[str, Hashable], ...]
    flags: tuple[Hashable, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.tensors, self.constants, self.flags)))

    def __hash__(self) -> int:
        """Known from the start, see :class:`EncoderBatch`."""
        return self._hash

    def __reduce__(self) -> tuple[type[CallSignature], tuple[Any, ...]]:
        """Pickle without the hash, see :class:`EncoderBatch`."""
        return (type(self), (self.tensors, self.constants, self.flags))


_FLAGS = ("output_hidden_states", "output_attentions", "_output_attentions", "return_dict")
_PLAIN = frozenset({type(None), str, torch.dtype})
_NUMBERS = {"bool": bool, "int": int, "float": float}


def config_flags(config: Any) -> tuple[Hashable, ...]:
    """Values of the config's switches that change what a forward returns."""
    # Not getattr: a config of transformers looks every attribute up in Python.
    values = tuple(map(config.__dict__.get, _FLAGS))
    return (*values, *map(type, values))  # True == 1, and they don't mean the same


def wants_attentions(signature: CallSignature) -> bool:
    """Whether the call or the config asks for attention weights."""
    constant = dict(signature.constants).get("output_attentions")
    return any(map(thaw, (*signature.flags[1:3], constant)))


def freeze(value: Any) -> Hashable:
    """Return `value` as something hashable.

    Raises:
        Refusal: It is no plain constant.
    """
    if type(value) in _PLAIN:
        plain: Hashable = value
        return plain
    if type(value) in _NUMBERS.values():  # True == 1, but output_hidden_states tells them apart
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(freeze(v) for v in value))
    raise Refusal(Reason.UNSUPPORTED_CALL, detail=f"an argument of type {type(value).__name__}")


def fingerprint(value: Any) -> Hashable:
    """:func:`freeze`, where an argument that can't be frozen is known by its identity."""
    try:
        return freeze(value)
    except Refusal:  # such a call is refused when it is read
        return id(value)


def thaw(value: Hashable) -> Any:
    """Undo :func:`freeze`."""
    if isinstance(value, tuple):
        name, values = value
        if name in _NUMBERS:
            return values
        items = [thaw(v) for v in values]
        return items if name == "list" else tuple(items)
    return value
