"""The callable that stands in for a tower's method while mmgraph is attached.

It sits in the instance's ``__dict__``, so that the class, its signature and ``state_dict`` stay as
they are. What a reader would get wrong: a tower's own forward may call another wrapped method
(timm's forward calls forward_features); inside a call of ours every wrapped method is passed
straight through, so that nothing is counted, captured or replayed twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from mmgraph.attachment.unread import unread_parameters
from mmgraph.encoders import TowerEncoder, inside_tower
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.stats import StatsRecorder
from mmgraph.types import Reason, Refusal

__all__ = ["AttachedMethod", "rehearsal"]

_listener: ContextVar[Callable[[TowerEncoder, dict[str, Any]], None] | None] = ContextVar(
    "mmgraph_listener", default=None
)


@contextmanager
def rehearsal(listener: Callable[[TowerEncoder, dict[str, Any]], None]) -> Iterator[None]:
    """Within the block attached towers hand their arguments to `listener` before they run."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _StandIn:
    """Stands on an instance in the place of a method of ``nn.Module``.

    Attributes:
        name: Of the method.
    """

    name = ""

    def __init__(self, encoder: TowerEncoder) -> None:
        self._module = encoder.tower.module
        self._encoder = encoder
        found = self._module.__dict__.get(self.name)
        self._before = None if isinstance(found, _StandIn) else found  # that of a copy is none

    @classmethod
    def install(cls, encoder: TowerEncoder) -> None:
        """Put one on the tower of `encoder`, unless there is one."""
        names = encoder.tower.module.__dict__
        if not isinstance(names.get(cls.name), cls):
            names[cls.name] = cls(encoder)

    @classmethod
    def remove(cls, names: dict[str, Any]) -> None:
        """Put back in `names` what was there before, if one of these is."""
        found = names.get(cls.name)
        if isinstance(found, _StandIn):
            del names[cls.name]
            if found._before is not None:
                names[cls.name] = found._before

    def _method_of(self, module: nn.Module) -> Any:
        if self._before is not None and module is self._module:
            return self._before
        return MethodType(getattr(type(module), self.name), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the tower has the method of its class."""
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return _OfItsClass(memo.get(id(self._module), self._module), self.name)

    def __reduce__(self) -> Any:
        return (_OfItsClass, (self._module, self.name))


class _OfItsClass(_StandIn):
    """What a copy of an attached tower has in place of a stand-in: the method of its class.

    The class is looked up at each call, as it may be set to another one later.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self._module = module
        self._before = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method_of(self._module)(*args, **kwargs)


class _Replicate(_StandIn):
    """Makes replicas for ``nn.DataParallel``, which copies what is on the instance along.

    A replica is another module, on another device: it has no graphs.
    """

    name = "_replicate_for_data_parallel"

    def __call__(self) -> Any:
        with self._encoder.preparation.turns.together():  # not of what a capture has made of it
            replica = self._method_of(self._module)()
        names = replica.__dict__
        for stand_in in _STAND_INS:
            stand_in.remove(names)
        for method in [value for value in names.values() if isinstance(value, AttachedMethod)]:
            method.take_off(names)
        return replica


class _Apply(_StandIn):
    """Lets the tower's memory go before ``to()`` and its kin give it other memory."""

    name = "_apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._encoder.watch.release()
        return self._method_of(self._module)(*args, **kwargs)


_STAND_INS: tuple[type[_StandIn], ...] = (_Replicate, _Apply)


class AttachedMethod:
    """Calls a tower through its manager, or in eager mode while a gate is closed.

    Attributes:
        encoder: The tower and the method that is wrapped.
        manager: Serves the calls, or ``None``.
        closed: The reason under which items are counted without a manager.
        stats: Counters without a manager.
    """

    def __init__(
        self, encoder: TowerEncoder, manager: EncoderCudaGraphManager | None, closed: Reason | None
    ) -> None:
        assert (manager is None) != (closed is None), "either a manager or a reason why not"
        self.encoder = encoder
        self.manager = manager
        self.closed = closed
        self.stats = StatsRecorder()
        self._before: Any = None
        self._unread = encoder.signature.foreign | unread_parameters(self.module, encoder.method)

    @property
    def module(self) -> nn.Module:
        """The wrapped tower."""
        return self.encoder.tower.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoder = self.encoder
        if inside_tower():
            return encoder.forward(*args, **kwargs)
        try:
            call = encoder.signature.bind(args, kwargs)
        except Refusal as refusal:
            output = encoder.forward(*args, **kwargs)  # mostly Python's own TypeError
            self._count_miss(self.closed or refusal.reason)
            return output
        if not self._unread.isdisjoint(call):
            call = {n: v for n, v in call.items() if not self._is_unread(n, v)}
        listener = _listener.get()
        if listener is not None:
            listener(encoder, call)
        manager = self.manager
        if manager is not None:
            return manager.run(call)
        assert self.closed is not None
        self._count_eager(call, self.closed)
        return encoder.forward(**call)

    def install(self) -> None:
        """Put this in the place of the method."""
        method = self.encoder.method
        self._before = self.module.__dict__.get(method)
        self.module.__dict__[method] = self
        for stand_in in _STAND_INS:
            stand_in.install(self.encoder)

    def remove(self) -> None:
        """Put back what was there before."""
        names = self.module.__dict__
        if names.get(self.encoder.method) is not self:
            return  # somebody wrapped over us or took us off: theirs to keep
        self.take_off(names)
        if not any(isinstance(value, AttachedMethod) for value in names.values()):
            for stand_in in _STAND_INS:
                stand_in.remove(names)

    def take_off(self, names: dict[str, Any]) -> None:
        """Put back in `names`, those of the module or a replica, what was there before."""
        if self._before is None:
            del names[self.encoder.method]
        else:
            names[self.encoder.method] = self._before

    def shutdown(self) -> None:
        """Leave the module and free all graphs for good; counters stay, later calls are eager."""
        self.remove()
        manager = self.manager
        if manager is not None:
            self.closed, self.stats, self.manager = Reason.DETACHED, manager.counters, None
            manager.shutdown()

    def _count_miss(self, reason: Reason) -> None:
        manager = self.manager
        if manager is not None:
            manager.count_miss(reason)
        else:
            self.stats.called()
            self.stats.missed(reason, 1)

    def _is_unread(self, name: str, value: Any) -> bool:
        return name in self._unread and isinstance(value, torch.Tensor)

    def _count_eager(self, call: dict[str, Any], reason: Reason) -> None:
        """Count a call without a manager, with its sizes: `mmgraph plan` reads them."""
        self.stats.called()
        try:
            batch = self.encoder.item_specs(call)
        except Refusal as refusal:
            self.stats.missed(reason, refusal.num_items)
            return
        self.stats.seen(tuple([item.num_tokens for item in batch.items]))
        self.stats.missed(reason, len(batch.items))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the tower is a tower without graphs."""
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        twin = memo.get(id(self.module), self.module)
        return MethodType(getattr(type(self.module), self.encoder.method), twin)

    def __reduce__(self) -> Any:
        """A tower read from a pickle is a tower without graphs."""
        return (getattr, (self.module, self.encoder.method))
