"""`CUDAGraphWrapper`: a callable that runs from graphs where the forward context says so.

The rule: a graph is recorded on the very tensors of the call that captured it. Later calls in the
same batch descriptor must pass tensors at the same addresses, as engines do with their persistent
buffers; debug mode checks that. What a replay returns lives in the pool of the backend until the
next replay of any graph there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mmgraph.env import debug_enabled
from mmgraph.errors import CaptureError, ConfigError, ReplayError
from mmgraph.graphs.backend import CapturedGraph, GraphBackend
from mmgraph.graphs.modes import BatchDescriptor, CUDAGraphMode, current_forward_context

__all__ = ["CUDAGraphWrapper"]


class CUDAGraphWrapper:
    """Captures `runnable` once for each batch descriptor in its own mode, then replays.

    Outside a forward context, in mode NONE and in a mode that isn't its own it just calls
    `runnable`. Attributes that it lacks are those of `runnable`.

    Args:
        runnable: What to run; everything but the contents of its tensors is baked in.
        runtime_mode: FULL or PIECEWISE: the mode in which this wrapper captures and replays.
        backend: Captures the graphs; all of one backend share a memory pool.

    Raises:
        ConfigError: The mode is no mode of a forward.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode,
        *,
        backend: GraphBackend,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ConfigError(
                f"runtime_mode must be FULL or PIECEWISE, got {runtime_mode.name}: in other modes "
                "there is nothing to capture"
            )
        self.runnable = runnable
        self.runtime_mode = runtime_mode
        self._backend = backend
        self._graphs: dict[BatchDescriptor, _Recorded] = {}
        self._debug = debug_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current_forward_context()
        if context is None or context.mode is not self.runtime_mode:
            return self.runnable(*args, **kwargs)
        recorded = self._graphs.get(context.descriptor)
        if recorded is None:
            if not context.capture_allowed:
                raise CaptureError(
                    f"there is no {self.runtime_mode.name} graph for {context.descriptor}, and "
                    "this context doesn't allow capturing one: capture it beforehand, or dispatch "
                    "the batch in mode NONE"
                )
            recorded = _Recorded.capture(self.runnable, args, kwargs, self._backend)
            self._graphs[context.descriptor] = recorded
        elif self._debug:
            recorded.check(args, kwargs)
        with self._backend.ordered():
            return recorded.replay()

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
        while isinstance(inner, CUDAGraphWrapper):
            inner = inner.runnable
        return inner

    def clear(self) -> None:
        """Free all graphs."""
        for recorded in self._graphs.values():
            recorded.graph.close()
        self._graphs.clear()


class _Recorded:
    """A graph, the addresses that it reads, and the structure of what it returns."""

    def __init__(
        self,
        graph: CapturedGraph,
        addresses: dict[str, int],
        rebuild: Callable[[list[torch.Tensor]], Any],
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
        backend: GraphBackend,
    ) -> _Recorded:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        buffers = {str(i): x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        rebuilds: list[Callable[[list[torch.Tensor]], Any]] = []

        def run(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            values = [tensors.get(str(i), leaf) for i, leaf in enumerate(leaves)]
            call_args, call_kwargs = pytree.tree_unflatten(values, structure)
            outputs, rebuild = _flatten_output(runnable(*call_args, **call_kwargs))
            rebuilds.append(rebuild)
            return outputs

        graph = backend.capture(run, buffers)
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


def _flatten_output(output: Any) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    leaves, structure = pytree.tree_flatten(output)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: list[torch.Tensor]) -> Any:
        values = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return pytree.tree_unflatten(values, structure)

    return [leaves[i] for i in places], rebuild


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
