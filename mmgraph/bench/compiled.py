"""The tower under ``torch.compile``, which is the other way to make it fast.

The whole tower is compiled for exactly the size of the call, and a packed one gets its metadata, so
that nothing breaks the graph or waits for the device: as good as the compiler can be had without
changing the tower. Its code is thrown away after each row, with all other compiled code, or one
variant would count the recompilations of another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from mmgraph.bench.handmade import lean_call
from mmgraph.bench.names import COMPILE, COMPILE_MAX_AUTOTUNE, COMPILE_REDUCE_OVERHEAD
from mmgraph.bench.records import Cost
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call, synchronizer

__all__ = ["MODES", "open_compiled"]

MODES: dict[str, str | None] = {
    COMPILE: None,
    COMPILE_REDUCE_OVERHEAD: "reduce-overhead",
    COMPILE_MAX_AUTOTUNE: "max-autotune",
}
"""Modes of the compiler, by variant."""

_MORE_CALLS = 2  # graphs of the compiler warm up at the first call and are captured at the second


@contextmanager
def open_compiled(
    subject: Subject, size: CallSize, inputs: Inputs, name: str
) -> Iterator[tuple[Call, Cost]]:
    """Compile a twin of the tower for the variant `name` and make its first calls.

    Gives the call and what it took. Whatever the compiler raises comes through.
    """
    torch._dynamo.reset()
    try:
        call = _compiled_call(subject, size, inputs, MODES[name])
        synchronize = synchronizer(subject.device)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds = time.perf_counter() - start
        for _ in range(_MORE_CALLS):
            call()
        synchronize()
        yield call, Cost(first_call_s=seconds, compile_s=seconds)
    finally:
        torch._dynamo.reset()


def _compiled_call(subject: Subject, size: CallSize, inputs: Inputs, mode: str | None) -> Call:
    tower = cast(nn.Module, torch.compile(subject.twin(), mode=mode, dynamic=False))
    call = lean_call(subject, size, inputs, tower)
    if mode is None or subject.device.type != "cuda":
        return call

    def run() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # the output of the call before may go
        return call()

    return run
