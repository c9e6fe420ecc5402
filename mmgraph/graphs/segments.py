"""Captures in segments: graphs between operations that stay eager.

Design note. A breakable capture runs the callable once. Where it comes to an operation marked with
:func:`eager_break` the open segment ends and is *replayed*, because recording alone computes
nothing; the operation then runs eagerly on real values, and the next segment begins. A replay does
the same in order: segment, operation, segment, on the memory of the capture.

The rule: what an operation got and what it returned at capture is held strongly, since the
segments around it hold those addresses. What it returns at a replay is copied to where the next
segment reads it, so it must have the shapes of the capture. Where that is memory of somebody else
(an argument that it hands back, a weight) nothing may be copied there: then it must be the same
memory each time.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mmgraph.errors import ConfigError, ReplayError
from mmgraph.graphs.backend import CapturedGraph
from mmgraph.graphs.trees import storage_of, tensors_in
from mmgraph.graphs.weak import weak_view

__all__ = [
    "BreakableGraph",
    "SegmentRecorder",
    "break_at_modules",
    "breaks_at",
    "eager_break",
    "recording",
    "without_breaks",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SegmentRecorder(ABC):
    """Records segments one after another; a backend has one for each breakable capture."""

    @abstractmethod
    def begin(self) -> None:
        """Start a segment."""

    @abstractmethod
    def end(self) -> CapturedGraph:
        """End the segment that is open and return it."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave the segment that is open, if one is, after an error."""


class _EagerCall:
    """An operation between two segments, with what it got and where its results belong."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        self._call = functools.partial(function, *args, **kwargs)
        self._name = getattr(function, "__qualname__", repr(function))
        self._targets, self._structure = pytree.tree_flatten(out)
        owner = getattr(function, "__self__", args[0] if args else None)
        self._foreign = {storage_of(t) for t in (*tensors_in((args, kwargs)), *_held_by(owner))}

    def replay(self) -> None:
        leaves, structure = pytree.tree_flatten(self._call())
        if structure != self._structure:
            raise ReplayError(f"{self._name} returned another structure than when it was captured")
        for leaf, target in zip(leaves, self._targets, strict=True):
            if not isinstance(target, torch.Tensor):
                if leaf != target:
                    raise ReplayError(f"{self._name} returned {leaf!r}, {target!r} was captured")
            elif leaf.shape != target.shape or leaf.dtype != target.dtype:
                raise ReplayError(
                    f"{self._name} returned {tuple(leaf.shape)} of {leaf.dtype}, but what follows "
                    f"was captured for {tuple(target.shape)} of {target.dtype}"
                )
            elif storage_of(target) not in self._foreign:
                target.copy_(leaf)
            elif (leaf.data_ptr(), leaf.stride()) != (target.data_ptr(), target.stride()):
                raise ReplayError(
                    f"{self._name} returned an argument or a weight when it was captured, and now "
                    "something else: let it return a copy"
                )


class BreakableGraph(CapturedGraph):
    """Segments and eager calls in order, and the outputs that the last of them leave."""

    def __init__(
        self, steps: list[CapturedGraph | _EagerCall], outputs: list[torch.Tensor]
    ) -> None:
        self._steps = steps
        self._outputs = outputs
        self._kept: tuple[torch.Tensor, ...] = ()
        self.num_fast: int | None = None
        """Blocks that were recorded the fast way, where they could be (``regions.py``)."""
        self.num_bytes = sum(s.num_bytes for s in steps if isinstance(s, CapturedGraph))

    @property
    def num_breaks(self) -> int:
        """Operations that run eagerly."""
        return sum(isinstance(step, _EagerCall) for step in self._steps)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hold tensors that segments read, for as long as the graph lives."""
        self._kept = tuple(tensors)

    def replay(self) -> list[torch.Tensor]:
        with torch.no_grad(), without_breaks():
            for step in self._steps:
                step.replay()
        return self._outputs

    def close(self) -> None:
        for step in self._steps:
            if isinstance(step, CapturedGraph):
                step.close()
        self._steps, self._outputs, self._kept = [], [], ()


class _Capture:
    """A breakable capture that is going on."""

    def __init__(self, recorder: SegmentRecorder) -> None:
        self._recorder = recorder
        self.steps: list[CapturedGraph | _EagerCall] = []

    def run(self, run: Callable[[], list[torch.Tensor]]) -> BreakableGraph:
        self._recorder.begin()
        outputs = [weak_view(tensor) for tensor in run()]
        self._end_segment()
        return BreakableGraph(self.steps, outputs)

    def break_at(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._end_segment()
        with without_breaks():
            out = function(*args, **kwargs)
        self.steps.append(_EagerCall(function, args, kwargs, out))
        self._recorder.begin()
        return out

    def abandon(self) -> None:
        """Close what is open and free what was recorded before an error."""
        try:
            self._recorder.abandon()
        finally:
            for step in self.steps:
                if isinstance(step, CapturedGraph):
                    step.close()

    def _end_segment(self) -> None:
        segment = self._recorder.end()
        self.steps.append(segment)
        segment.replay()


_open: ContextVar[_Capture | None] = ContextVar("mmgraph_breakable_capture", default=None)


def recording(recorder: SegmentRecorder, run: Callable[[], list[torch.Tensor]]) -> BreakableGraph:
    """Run `run` once under `recorder`, broken where it meets an :func:`eager_break`."""
    capture = _Capture(recorder)
    token = _open.set(capture)
    try:
        # Plain tensors even inside inference mode: replays write them in every mode.
        with torch.inference_mode(False), torch.no_grad():
            return capture.run(run)
    except BaseException:
        capture.abandon()
        raise
    finally:
        _open.reset(token)


@contextmanager
def without_breaks() -> Iterator[None]:
    """Within the block breaks do nothing: in a FULL capture, and inside another break."""
    token = _open.set(None)
    try:
        yield
    finally:
        _open.reset(token)


def eager_break(function: _Function) -> _Function:
    """Mark an operation that graphs can't hold: a breakable capture runs it between segments.

    Anywhere else, and inside another break, it is just called. Its results must have the same
    shapes at each replay as when it was captured.
    """

    @functools.wraps(function)
    def broken(*args: Any, **kwargs: Any) -> Any:
        capture = _open.get()
        if capture is None:
            return function(*args, **kwargs)
        return capture.break_at(function, args, kwargs)

    return cast(_Function, broken)


def _held_by(owner: Any) -> Iterator[torch.Tensor]:
    """Tensors that live in a module, whether it has them registered or not."""
    for module in owner.modules() if isinstance(owner, nn.Module) else ():
        own = (module._parameters, module._buffers, vars(module))
        yield from (v for part in own for v in part.values() if isinstance(v, torch.Tensor))


@contextmanager
def breaks_at(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block `modules` are breaks; their classes aren't edited."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            before.append((module, module.__dict__.get("forward")))
            forward: Any = eager_break(module.forward)
            forward.__module__ = __name__  # not the model's: it is ours, and goes
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, original in reversed(before):
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = original


def break_at_modules(model: nn.Module, names: tuple[str, ...]) -> AbstractContextManager[None]:
    """Like :func:`breaks_at`, for the submodules of `model` called `names`.

    Raises:
        ConfigError: There is no such submodule.
    """
    modules = dict(model.named_modules())
    missing = [name for name in names if name not in modules]
    if missing:
        raise ConfigError(f"there is no submodule {missing[0]!r} to break at")
    return breaks_at([modules[name] for name in names])
