"""Noticing that a tower is no longer what was captured, before an answer of a replay is handed out.

A graph holds addresses and runs no Python. So it must not serve after a weight moved, was
replaced or quantised, a submodule was swapped, or adapters came, went or were switched; and not
while somebody has put a hook on a submodule, since that wouldn't fire.

What a reader would get wrong: nothing here walks the modules of a tower at a call. Most changes
go through torch's registration hooks. The rest (setting ``.data``, ``to()``, an entry of
``_parameters`` or ``_modules``, a ``forward``) shows in the tables of the modules and in the
addresses of what they hold, which ``map`` and ``chain`` read without a line of Python: 0.1 us a
parameter, several times that where a CPU's cache has lost them.

So whoever has captured the tower holds its memory (:meth:`TowerWatch.hold`): a replay after the
tower has changed then reads what was there, and harms nothing, and :attr:`TowerWatch.version` may
be compared while it runs. Memory is let go with the graphs that read it, when a parameter is
registered, and before ``to()`` and its kin move the tower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from mmgraph.modules.attention import attention_configs
from mmgraph.modules.placement import placement_problem
from mmgraph.modules.tracing import is_traced
from mmgraph.preparation import Turns, find_blocks

__all__ = ["TowerWatch"]

_address = torch.Tensor.data_ptr
_PLAIN = (nn.Parameter, nn.Buffer, torch.Tensor)
_training = itemgetter("training")
_END = object()
_HARMLESS = ("transformers.", "mmgraph.")
"""Hooks of these only collect outputs of the call that is running; a capture collects them too."""
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class TowerWatch:
    """Keeps an eye on one tower.

    Args:
        module: The tower, as it is when its graphs are captured.
        turns: Who may alter it for a capture.

    Attributes:
        misplaced: Why no graph can use the weights where they were at the last look, if so.
    """

    def __init__(self, module: nn.Module, turns: Turns | None = None) -> None:
        self._module = module
        self._turns = turns or Turns()
        self._version = 0
        self._stale = self._forgotten = False
        self._held: WeakSet[_Held] = WeakSet()
        self._lock = threading.Lock()
        self._look()
        self._known = self._state()
        _registrations.watch(self)

    @property
    def version(self) -> tuple[Any, ...]:
        """Something else whenever graphs that were captured before must not serve.

        Waits while another thread has altered the tower for a capture.
        """
        before = self._turns.alterations()
        if before >= 0:
            sizes = list(map(len, self._namespaces))
            moved, state = self._stale or self._has_moved(sizes), self._state()
            if not moved and before == self._turns.alterations():
                self._sizes = sizes
                self._known = state
                return state
        if is_traced():  # what the modules hold now may have no address, and no graph serves
            return self._known
        with self._turns.together(), self._lock:
            if self._stale or self._has_moved(list(map(len, self._namespaces))):
                self._version += 1
                self._look()
            self._known = self._state()
            return self._known

    def _state(self) -> tuple[Any, ...]:
        return (
            self._version,
            self._adapters(),
            tuple([config._attn_implementation_internal for config in self._configs]),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )

    def hold(self) -> _Held | None:
        """Keep the memory that graphs of the tower as it is now read; ``None`` if it has moved."""
        with self._lock:
            tensors = list(chain.from_iterable(self._plain))
            if self._forgotten or self._stale or list(map(_address, tensors)) != self._addresses:
                return None
            held = _Held(tensors, self._samples, self._turns)
            self._held.add(held)
            return held

    def release(self) -> None:
        """Let go of all memory that is held."""
        for held in list(self._held):
            held.let_go()

    @property
    def is_hooked(self) -> bool:
        """Whether a module has a hook that a replay wouldn't call."""
        # Each hook has a number, which a class of torch counts: no new number, no new hook. The
        # tables themselves are hundreds, and seldom in a CPU's cache.
        if self._hooked or self._last_hook != RemovableHandle.next_id:
            self._read_hooks()
        return self._hooked or bool(
            torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
        )

    @property
    def is_training(self) -> bool:
        """Whether the tower or a part of it that does other things then is in training mode."""
        return self._module.training or any(map(_training, self._moody))

    @property
    def wants_gradients(self) -> bool:
        """Whether a parameter or buffer takes part in training."""
        tensors = chain.from_iterable(self._tables)
        return any(getattr(tensor, "requires_grad", False) for tensor in tensors)

    def forget(self) -> None:
        """Stop watching."""
        _registrations.forget(self)
        self._forgotten = True
        self.release()

    def mark_stale(self) -> None:
        """Note that a parameter, buffer or submodule was registered."""
        self._stale = True
        self.release()

    def _look(self) -> None:
        self._stale = False
        modules = list(self._module.modules())
        inner = modules[1:]  # those of the tower itself are called around what stands in for it
        self.modules = frozenset(map(id, modules))
        self.misplaced = placement_problem(self._module)
        parts = [*self._module.children(), *find_blocks(self._module)]
        firsts = (next(part.parameters(), None) for part in parts)
        self._samples = [p for p in firsts if p is not None and type(p) in _PLAIN]
        self._look_at_tables(modules)
        self._namespaces = [m.__dict__ for m in inner]
        self._sizes = list(map(len, self._namespaces))
        self._overrides = self._find_overrides()
        self._configs = attention_configs(self._module)
        self._moody = [m.__dict__ for m in modules if _differs_in_training(m)]
        self._tuned = [m for m in modules if all(hasattr(m, name) for name in _ADAPTERS)]
        self._hook_tables = [t for m in inner for t in (m._forward_hooks, m._forward_pre_hooks)]
        self._read_hooks()

    def _look_at_tables(self, modules: Sequence[nn.Module]) -> None:
        """Tables of tensors with addresses are known by those, others by what they hold."""
        found = [t.values() for m in modules for t in (m._parameters, m._buffers) if t]
        tables: list[Iterable[Any]] = []
        others: list[Iterable[Any]] = [m._modules.values() for m in modules if m._modules]
        singles: list[Any] = []
        for table in found:
            plain = [x for x in table if type(x) in _PLAIN]  # others hide their addresses
            if len(plain) == len(table):
                tables.append(table)
            else:
                others.append(table)
                singles += plain
        self._tables = found
        self._plain = (*tables, singles)
        self._addresses = self._read_addresses()
        self._others = others
        self._members = (*chain.from_iterable(others), _END)

    def _has_moved(self, sizes: list[int]) -> bool:
        """Whether something was replaced that nobody was told of; `sizes` are of namespaces."""
        try:
            return (
                self._read_addresses() != self._addresses
                or not all(
                    map(is_, chain(chain.from_iterable(self._others), (_END,)), self._members)
                )
                or any(names.get("forward") is not forward for names, forward in self._overrides)
                or (sizes != self._sizes and self._is_overridden())
            )
        except (TypeError, RuntimeError):  # no tensor any more; or a table changes at this moment
            return True

    def _read_addresses(self) -> list[int]:
        return list(map(_address, chain.from_iterable(self._plain)))

    def _is_overridden(self) -> bool:
        """Whether one more module got a ``forward`` of its own; other attributes may come."""
        return len(self._find_overrides()) != len(self._overrides)

    def _find_overrides(self) -> list[tuple[dict[str, Any], Any]]:
        """Methods that somebody else has put on a module, with where."""
        own = [(names, names.get("forward")) for names in self._namespaces]
        return [(names, forward) for names, forward in own if forward and not _is_ours(forward)]

    def _adapters(self) -> tuple[Any, ...]:
        """State of PEFT's layers, which switch adapters by setting plain attributes."""
        return tuple(map(_adapter_state, self._tuned))

    def _read_hooks(self) -> None:
        self._last_hook = RemovableHandle.next_id
        hooks = (hook for table in self._hook_tables for hook in tuple(table.values()))
        self._hooked = not all(map(_is_harmless, hooks))


class _Held:
    """Memory of a tower as it was captured.

    What a reader would get wrong: a storage can be emptied though somebody holds it (FSDP does
    that, a block at a time). So a tensor of each block is looked at.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], samples: Sequence[torch.Tensor], turns: Turns
    ) -> None:
        self._memory: list[torch.UntypedStorage] | None = [t.untyped_storage() for t in tensors]
        self._samples = list(samples)
        self._addresses = list(map(_address, samples))
        self._turns = turns

    def is_there(self) -> bool:
        """Whether all of it is still there, and no other thread has altered the tower."""
        if self._memory is None or self._turns.alterations() < 0:
            return False
        try:
            return list(map(_address, self._samples)) == self._addresses
        except RuntimeError:  # no tensor with an address any more
            return False

    def let_go(self) -> None:
        """Hold nothing any more."""
        self._memory = None
        self._samples = []


class _Registrations:
    """torch's registration hooks, there while a tower is watched."""

    def __init__(self) -> None:
        self._watches: WeakKeyDictionary[TowerWatch, None] = WeakKeyDictionary()
        self._handles: list[Any] = []
        self._lock = threading.Lock()

    def watch(self, watch: TowerWatch) -> None:
        with self._lock:
            self._watches[watch] = None
            if not self._handles:
                self._handles = [register(self._registered) for register in _REGISTER]

    def forget(self, watch: TowerWatch) -> None:
        with self._lock:
            self._watches.pop(watch, None)
            if not self._watches:
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        # Whatever module it is: our own are recognised by identity.
        for watch in list(self._watches):
            if id(module) in watch.modules:
                watch.mark_stale()


_REGISTER: Iterable[Callable[..., Any]] = (
    torch_modules.register_module_parameter_registration_hook,
    torch_modules.register_module_buffer_registration_hook,
    torch_modules.register_module_module_registration_hook,
)
_registrations = _Registrations()


def _differs_in_training(module: nn.Module) -> bool:
    """Whether a part of a tower drops, or counts statistics, in training mode."""
    names = ("p", "drop_prob", "dropout", "attention_dropout", "attn_drop", "dropout_p")
    rates = (getattr(module, name, 0) for name in names)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or any(
        isinstance(rate, float) and rate > 0 for rate in rates
    )


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    active, disabled = str(layer._active_adapter), layer._disable_adapters
    return (active, disabled, tuple(layer.merged_adapters), tuple(layer.scaling.items()))


def _is_ours(forward: Any) -> bool:
    function = forward.func if isinstance(forward, partial) else forward
    return str(getattr(function, "__module__", "")).startswith("mmgraph.")


def _is_harmless(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_HARMLESS)
