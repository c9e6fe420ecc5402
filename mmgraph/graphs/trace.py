"""The backend for machines without a GPU: record with torch.fx, replay without the model's Python.

It keeps the rules of a CUDA graph: shapes and host values are baked, parameters are held by
identity (in-place updates are followed), and reading data on the host is an error. It is there so
that everything above it really runs on a laptop and in CI, not to be fast.

The call is traced on fake tensors: on real ones a ``.tolist()`` would be baked without a word.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import CapturedGraph, GraphBackend, Runnable
from mmgraph.graphs.guard import HostAccess

__all__ = ["TraceBackend"]

_one_at_a_time = threading.RLock()
"""torch.fx traces in one thread at a time."""


class TracedGraph(CapturedGraph):
    """A torch.fx recording bound to its buffers."""

    num_bytes = 0

    def __init__(self, module: GraphModule, inputs: list[torch.Tensor]) -> None:
        self._module: GraphModule | None = module
        self._inputs = inputs

    def replay(self) -> list[torch.Tensor]:
        assert self._module is not None, "replay of a graph that was closed"
        with torch.no_grad():
            outputs: list[torch.Tensor] = self._module(*self._inputs)
        return outputs

    def close(self) -> None:
        self._module = None
        self._inputs = []


class TraceBackend(GraphBackend):
    """Records with ``make_fx`` on fake tensors."""

    name = "trace"
    is_timed = False

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: Hashable = None
    ) -> CapturedGraph:
        names = list(buffers)

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            outputs = run(dict(zip(names, tensors, strict=True)))
            self.about_to_end()
            return outputs

        try:
            with _one_at_a_time, torch.no_grad():
                with _WeightReads():  # also fills the model's caches: no fake tensor may get there
                    run(buffers)
                module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    *buffers.values()
                )
        except CaptureError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HostAccess(
                f"the call reads tensor data on the host (at {error.func}), which a graph can't do"
            ) from error
        except Exception as error:
            raise CaptureError(f"the call can't be recorded: {_first_line(error)}") from error
        _refuse_host_reads(module)
        return TracedGraph(module, list(buffers.values()))

    def synchronize(self) -> None:
        """Do nothing: the CPU is in step with Python."""

    def use_pool(self, pool: Any | None) -> None:
        """Do nothing: a recording allocates as it runs."""

    def settle(self) -> None:
        """Do nothing: the CPU is in step with Python."""

    def ordered(self) -> AbstractContextManager[Any]:
        return self._lock

    def busy(self) -> bool:
        return False


class _WeightReads(TorchDispatchMode):
    """Refuses reading a parameter on the host, which tracing would bake in without a word."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            source = args[0] if args[0]._base is None else args[0]._base
            if isinstance(source, torch.nn.Parameter):
                raise HostAccess("the call reads a weight on the host, which a graph can't do")
        return func(*args, **(kwargs or {}))


def _refuse_host_reads(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default or _is_dynamic(node):
            raise HostAccess(
                f"the call reads tensor data on the host (at {node.target}), which a graph can't do"
            )


def _is_dynamic(node: Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else (values,)
    return any(
        isinstance(size, torch.SymInt)
        for value in values
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
