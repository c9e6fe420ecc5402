"""What the two runs of a folded call see: modes of the dispatcher and of torch's functions.

See ``folding.py`` for what they are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import CapturedGraph
from mmgraph.graphs.guard import COPIES, HOST_READS, INDEXED
from mmgraph.graphs.operations import (
    ReadsContents,
    Step,
    chosen,
    comes_from_host,
    draws,
    fresh,
    makes_from_python,
    positions,
    python_data,
    refuse_reads,
    uploaded,
    written,
)
from mmgraph.graphs.recorders import ModesRecorder
from mmgraph.graphs.trees import storage_of, tensors_in

if TYPE_CHECKING:
    from mmgraph.graphs.folding import Folding

__all__ = ["Fold", "FoldFunctions", "Observer"]

_aten = torch.ops.aten
_READS = frozenset({_aten._local_scalar_dense.default, _aten.is_nonzero.default})
_SAME_MEMORY = frozenset({_aten.detach.default, _aten.alias.default})
"""No steps: torch adds them to some operations, though not each time."""
_TO_PYTHON = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


class _Observe(TorchDispatchMode):
    def __init__(self, folding: Folding) -> None:
        super().__init__()
        self._folding = folding

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        folding, kwargs = self._folding, kwargs or {}
        if func in _SAME_MEMORY:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        lifted = func is _aten.lift_fresh.default  # a tensor from Python's own numbers
        random = draws(func, args, kwargs)
        constant = (lifted or folding.is_constant(inputs)) and not random
        if not constant:
            refuse_reads(func, args, kwargs, folding.is_constant)
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        moves = func in COPIES and len({t.device.type for t in inputs + outputs}) > 1
        if moves and not constant:
            raise ReadsContents(str(func))
        step = Step(func, out, constant=constant)
        step.on_host = lifted or moves or random or func in HOST_READS
        if func in INDEXED:
            step.indices = positions(args, folding.is_constant)
            step.values = uploaded(args, folding.is_constant)
            step.on_host |= step.indices is not None or step.values is not None
        self._follow_memory(step, args, kwargs, inputs, outputs)
        folding.steps.append(step)
        return out

    def _follow_memory(
        self, step: Step, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]
    ) -> None:
        folding = self._folding
        storages = {storage_of(t) for t in written(step.func, args, kwargs)}
        given = {storage_of(t) for t in inputs}
        step.reads = [t for t in inputs if folding.is_constant([t])]
        step.writes = frozenset(storages)
        step.makes = frozenset({storage_of(t) for t in outputs} - given)
        if step.constant:
            for tensor in outputs:
                folding.constant.setdefault(storage_of(tensor), tensor)
        else:
            folding.read |= given & folding.constant.keys()
        folding.write(storages, content=not step.constant)
        step.touches = frozenset(storages | {storage_of(t) for t in outputs})
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        step.returned = [places.get(id(tensor), -1) for tensor in outputs]


class Fold(TorchDispatchMode):
    """Returns what constant steps returned before, and does the others."""

    def __init__(self, folding: Folding) -> None:
        super().__init__()
        self._folding = folding

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        folding = self._folding
        if func in _SAME_MEMORY:
            return func(*args, **(kwargs or {}))
        step = folding.next_step(func)
        if step.constant and (func in _READS or not step.touches & folding.in_graph):
            return fresh(step, tensors_in((args, kwargs)))
        inputs = tensors_in((args, kwargs))
        if step.constant and comes_from_host(step, inputs):
            raise CaptureError(f"a table that is made on the host is written with content, {func}")
        if step.indices is not None:
            args = (args[0], chosen(step.indices, args[1]), *args[2:])
        if step.values is not None:
            args = (*args[:2], step.values, *args[3:])
        folding.keep(tensors_in((args, kwargs)))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Sees what the dispatcher doesn't: numbers that become tensors, and tensors numbers."""

    def __init__(self, folding: Folding) -> None:
        super().__init__()
        self._folding = folding

    def _tabled(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with lists of positions as tensors, which are uploaded unseen otherwise."""
        if func not in _INDEXING or not args[0].is_cuda:
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(isinstance(i, list) for i in index):
            return args
        tables = tuple(
            self.__torch_function__(torch.tensor, (), (i,), {"device": args[0].device})
            if isinstance(i, list)
            else i
            for i in index
        )
        return (args[0], tables, *args[2:])


class _ObserveFunctions(_Functions):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        folding, kwargs = self._folding, kwargs or {}
        args = self._tabled(func, args)
        if func in _TO_PYTHON and not folding.is_constant(args[:1]):
            raise ReadsContents(func.__name__)
        if not makes_from_python(func, args, kwargs):
            out = func(*args, **kwargs)
            folding.show(t for t in tensors_in(out) if folding.is_constant([t]))
            return out
        if not folding.is_constant(tensors_in(python_data(func, args, kwargs))):
            raise ReadsContents(func.__name__)  # torch reads it with all modes off
        start = len(folding.steps)
        out = func(*args, **kwargs)
        del folding.steps[start:]  # steps on the way there count as one
        folding.constant[storage_of(out)] = out
        step = Step(func, out, constant=True)
        step.touches = frozenset({storage_of(out)})
        step.on_host = True
        folding.steps.append(step)
        return out


class FoldFunctions(_Functions):
    """Returns the tables that were made of Python's numbers before."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args = self._tabled(func, args)
        if not makes_from_python(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        step = self._folding.next_step(func)
        if step.touches & self._folding.in_graph:
            raise CaptureError("a table that is made on the host is written with content")
        return step.out


class Observer(ModesRecorder):
    """Recorder of the first run; looks at constants where breaks begin and end."""

    def __init__(self, folding: Folding) -> None:
        super().__init__(None, _Observe(folding), _ObserveFunctions(folding))
        self._folding = folding

    def begin(self) -> None:
        self._folding.break_ended()
        super().begin()
        self._folding.is_observing = True

    def end(self) -> CapturedGraph:
        self._folding.is_observing = False
        segment = super().end()
        self._folding.break_begins()
        return segment
