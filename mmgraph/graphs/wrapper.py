"""Callables that run from graphs where the forward context says so.

The rule: a graph is recorded on the very tensors of the call that captured it. Later calls in the
same batch descriptor must pass tensors at the same addresses, as engines do with their persistent
buffers; debug mode checks that. What a replay returns lives in the pool of the backend until the
next replay of any graph there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mmgraph.env import debug_enabled
from mmgraph.errors import CaptureError, ConfigError, ReplayError
from mmgraph.graphs.backend import CapturedGraph, GraphBackend, Runnable
from mmgraph.graphs.breakable import capture_breakable
from mmgraph.graphs.modes import (
    BatchDescriptor,
    CUDAGraphMode,
    ForwardContext,
    current_forward_context,
)
from mmgraph.graphs.segments import without_breaks
from mmgraph.graphs.trees import Rebuild, flatten

__all__ = ["BreakableCUDAGraphWrapper", "CUDAGraphWrapper"]

_capturing: ContextVar[bool] = ContextVar("mmgraph_wrapper_capturing", default=False)


class _GraphWrapper(ABC):
    """What both wrappers share: one graph a batch descriptor, in the modes that are theirs."""

    def __init__(self, runnable: Callable[..., Any], backend: GraphBackend) -> None:
        self.runnable = runnable
        self._backend = backend
        self._graphs: dict[BatchDescriptor, _Recorded] = {}
        self._debug = debug_enabled()

    @abstractmethod
    def _serves(self, mode: CUDAGraphMode) -> bool:
        """Whether a forward in `mode` is this wrapper's to capture and replay."""

    @abstractmethod
    def _record(self, run: Runnable, buffers: Mapping[str, torch.Tensor]) -> CapturedGraph:
        """Capture a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current_forward_context()
        if context is None or _capturing.get() or not self._serves(context.mode):
            return self.runnable(*args, **kwargs)
        with self._backend.ordered():  # other threads may be asking for the same graph
            recorded = self._graphs.get(context.descriptor)
            if recorded is None:
                recorded = self._captured(context, args, kwargs)
            elif self._debug:
                recorded.check(args, kwargs)
            context.log.served += 1
            return recorded.replay()

    def _captured(
        self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Recorded:
        descriptor = context.descriptor
        if not context.capture_allowed:
            raise CaptureError(
                f"there is no {context.mode.name} graph for {descriptor}, and this context doesn't "
                "allow capturing one: capture it beforehand, or dispatch the batch in mode NONE"
            )
        with _inside_a_capture():
            recorded = _Recorded.capture(self.runnable, args, kwargs, self._record)
        self._graphs[descriptor] = recorded
        context.log.captured(partial(self._free, descriptor))
        return recorded

    def __getattr__(self, name: str) -> Any:
        if name == "runnable":  # not made yet, while unpickling or copying
            raise AttributeError(name)
        return getattr(self.runnable, name)

    @property
    def descriptors(self) -> list[BatchDescriptor]:
        """Batches that there is a graph for."""
        return list(self._graphs)

    def unwrap(self) -> Any:
        """Return the first runnable inside that is no wrapper of ours."""
        inner = self.runnable
        while isinstance(inner, _GraphWrapper):
            inner = inner.runnable
        return inner

    def clear(self) -> None:
        """Free all graphs; what they returned last goes with them."""
        for descriptor in self.descriptors:
            self._free(descriptor)

    def _free(self, descriptor: BatchDescriptor) -> None:
        recorded = self._graphs.pop(descriptor, None)
        if recorded is not None:
            recorded.graph.close()


class CUDAGraphWrapper(_GraphWrapper):
    """Captures `runnable` whole, once for each batch descriptor in its own mode, then replays.

    Outside a forward context, in mode NONE and in a mode that isn't its own it just calls
    `runnable`. Attributes that it lacks are those of `runnable`.

    Args:
        runnable: What to run; everything but the contents of its tensors is baked in.
        runtime_mode: FULL or PIECEWISE: the mode in which this wrapper captures and replays.
        backend: Captures the graphs; all of one backend share a memory pool.

    Raises:
        ConfigError: The mode is none that captures.
    """

    def __init__(
        self, runnable: Callable[..., Any], runtime_mode: CUDAGraphMode, *, backend: GraphBackend
    ) -> None:
        _check_mode(runtime_mode)
        super().__init__(runnable, backend)
        self.runtime_mode = runtime_mode

    def _serves(self, mode: CUDAGraphMode) -> bool:
        return mode is self.runtime_mode

    def _record(self, run: Runnable, buffers: Mapping[str, torch.Tensor]) -> CapturedGraph:
        with without_breaks():
            return self._backend.capture(run, buffers)


class BreakableCUDAGraphWrapper(_GraphWrapper):
    """Like :class:`CUDAGraphWrapper`, in segments around operations marked with ``eager_break``.

    Args:
        runnable: What to run.
        runtime_mode: The mode in which it captures and replays; ``None`` means any but NONE.
        backend: Captures the segments.

    Raises:
        ConfigError: The mode is none that captures, or (at a capture) the backend can't.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode | None = None,
        *,
        backend: GraphBackend,
    ) -> None:
        if runtime_mode is not None:
            _check_mode(runtime_mode)
        super().__init__(runnable, backend)
        self.runtime_mode = runtime_mode

    def _serves(self, mode: CUDAGraphMode) -> bool:
        if self.runtime_mode is None:
            return mode is not CUDAGraphMode.NONE
        return mode is self.runtime_mode

    def _record(self, run: Runnable, buffers: Mapping[str, torch.Tensor]) -> CapturedGraph:
        return capture_breakable(self._backend, run, buffers)


def _check_mode(mode: CUDAGraphMode) -> None:
    if mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        raise ConfigError(
            f"runtime_mode must be FULL or PIECEWISE, got {mode.name}: in other modes there is "
            "nothing to capture"
        )


@contextmanager
def _inside_a_capture() -> Iterator[None]:
    """Within the block wrappers inside the runnable just call what they wrap."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


class _Recorded:
    """A graph, the addresses that it reads, and the structure of what it returns."""

    def __init__(
        self,
        graph: CapturedGraph,
        addresses: dict[str, int],
        rebuild: Rebuild,
    ) -> None:
        self.graph = graph
        self._addresses = addresses
        self._rebuild = rebuild

    @classmethod
    def capture(
        cls,
        runnable: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Callable[[Runnable, Mapping[str, torch.Tensor]], CapturedGraph],
    ) -> _Recorded:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        buffers = {str(i): x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        rebuilds: list[Rebuild] = []

        def run(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            values = [tensors.get(str(i), leaf) for i, leaf in enumerate(leaves)]
            call_args, call_kwargs = pytree.tree_unflatten(values, structure)
            outputs, rebuild = flatten(runnable(*call_args, **call_kwargs))
            rebuilds.append(rebuild)
            return outputs

        graph = record(run, buffers)
        return cls(graph, _addresses(args, kwargs), rebuilds[-1])

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless every tensor is where it was at capture.

        Raises:
            ReplayError: One moved, came or went; the message names it.
        """
        now = _addresses(args, kwargs)
        for name in {**self._addresses, **now}:
            before, after = self._addresses.get(name), now.get(name)
            if before != after:
                raise ReplayError(
                    f"the tensor {name} was captured at {_at(before)} and is now at {_at(after)}: "
                    "write new contents into the same tensor, the graph reads that address"
                )

    def replay(self) -> Any:
        return self._rebuild(self.graph.replay())


def _addresses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Address of each tensor by what Python calls it: ``args[0]``, ``kwargs['x'][1]``."""
    addresses = {}
    for root, tree in (("args", args), ("kwargs", kwargs)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                addresses[root + pytree.keystr(path)] = leaf.data_ptr()
    return addresses


def _at(address: int | None) -> str:
    return "no address" if address is None else f"{address:#x}"
