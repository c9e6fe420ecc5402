"""Segments on machines without a GPU: a tape of operations on the tensors of the capture.

Like a CUDA graph a tape writes where the capture wrote: each operation runs again on the recorded
tensors and its result is copied into the recorded result. So segments and eager operations meet in
the same memory, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import CapturedGraph
from mmgraph.graphs.segments import SegmentRecorder
from mmgraph.graphs.trees import storage_of, tensors_in

__all__ = ["TapeRecorder"]

_HOST_READ = torch.ops.aten._local_scalar_dense.default


class _Operation:
    """One call of an ATen operator and the tensors that it made."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        read = {storage_of(t) for t in tensors_in((args, kwargs))}
        self._targets = tensors_in(out)
        self._writes = [storage_of(t) not in read for t in self._targets]
        self._is_view = not any(self._writes) and not func._schema.is_mutable

    def replay(self) -> None:
        if self._is_view:
            return  # it looks at the same memory as before
        results = tensors_in(self._func(*self._args, **self._kwargs))
        for target, result, writes in zip(self._targets, results, self._writes, strict=True):
            if writes:
                target.copy_(result)


class Tape(CapturedGraph):
    """A recorded segment."""

    num_bytes = 0

    def __init__(self, operations: list[_Operation]) -> None:
        self._operations = operations

    def replay(self) -> list[torch.Tensor]:
        with torch.no_grad():
            for operation in self._operations:
                operation.replay()
        return []

    def close(self) -> None:
        self._operations = []


class TapeRecorder(SegmentRecorder):
    """Records each segment under a dispatch mode of its own.

    Args:
        about_to_end: Called just before each segment ends.
    """

    def __init__(self, about_to_end: Callable[[], None]) -> None:
        self._about_to_end = about_to_end
        self._mode: _TapeMode | None = None

    def begin(self) -> None:
        self._mode = _TapeMode()
        self._mode.__enter__()

    def end(self) -> Tape:
        self._about_to_end()
        return Tape(self._leave().operations)

    def abandon(self) -> None:
        """Leave the mode if a segment is open."""
        if self._mode is not None:
            self._leave()

    def _leave(self) -> _TapeMode:
        assert self._mode is not None, "begin() comes first"
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return mode


class _TapeMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _HOST_READ:
            raise CaptureError("the segment reads tensor data on the host, which a graph can't do")
        out = func(*args, **kwargs)
        self.operations.append(_Operation(func, args, kwargs, out))
        return out
