"""The yardstick: what a graph costs without mmgraph around it.

This file uses nothing of mmgraph's graphs, on purpose. A replay here copies nothing in or out, so
what mmgraph takes longer is its own: planning, metadata, and the copies of inputs and outputs.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call, synchronizer
from mmgraph.encoders import PackedEncoder
from mmgraph.modules import use_attention_implementation
from mmgraph.ops import VARLEN_ATTENTION
from mmgraph.types import GraphKey

__all__ = ["capture_by_hand", "captured", "lean_call", "microseconds", "precomputed_metadata"]

_WARMUP_CALLS = 3
_CALLS_IN_GRAPH = 20
_ROUNDS = 5


def capture_by_hand(call: Call) -> Call:
    """Record `call` as PyTorch's manual shows it; return what replays it, and keeps `call`.

    What `call` reads (its metadata, say) has no other owner: the graph only knows addresses.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            output = call()
    except BaseException:
        generator.graphsafe_set_state(state)  # or it believes that it is still being captured
        raise

    return partial(_replay, graph, output, call)


def _replay(graph: torch.cuda.CUDAGraph, output: Any, _: Call) -> Any:
    graph.replay()
    return output


def captured(device: torch.device, call: Call) -> Call:
    """Return what replays `call` on a CUDA `device`; without one, `call` itself."""
    return capture_by_hand(call) if device.type == "cuda" else call


def microseconds(call: Call, device: torch.device) -> float:
    """Of one of many calls in one graph, so that launches count for next to nothing."""
    count = _CALLS_IN_GRAPH if device.type == "cuda" else 1

    def several() -> None:
        for _ in range(count):
            call()

    replay, synchronize = captured(device, several), synchronizer(device)
    spans = []
    for _ in range(_ROUNDS):
        synchronize()
        start = time.perf_counter_ns()
        replay()
        synchronize()
        spans.append(time.perf_counter_ns() - start)
    return min(spans) / count / 1e3


def lean_call(
    subject: Subject,
    size: CallSize,
    inputs: Inputs,
    tower: nn.Module,
    attention: str = VARLEN_ATTENTION,
) -> Call:
    """Bind a call of `tower` that waits for nothing: all that depends on data is there already.

    Args:
        subject: What `tower` is a twin of; the twin is changed for good.
        size: Of the call.
        inputs: Its arguments.
        tower: Called as its library built it, but that a packed one gets metadata and `attention`.
        attention: Name of attention over segments.
    """
    if size.grid is None or not subject.whole:
        return partial(inputs.call_eager, tower)
    use_attention_implementation(tower, attention)
    return partial(tower, inputs.main, **precomputed_metadata(subject, size))


def precomputed_metadata(
    subject: Subject, size: CallSize, key: GraphKey | None = None
) -> dict[str, Any]:
    """The data-dependent arguments of a packed tower, on its device.

    Args:
        subject: The tower.
        size: Of the call.
        key: What the arguments are padded to; by default they are for exactly this call.
    """
    encoder, grid = subject.encoder, size.grid
    assert isinstance(encoder, PackedEncoder), "a rows tower has no metadata"
    assert grid is not None, "a packed tower has a grid"
    item = encoder.metadata.item(grid)
    assert item is not None, "image sizes are rounded to merge groups"
    if key is None:
        segments = tuple(n * size.items for n in item.num_segments)
        key = GraphKey(size.tokens, segments, item.max_seqlen)
    block = torch.empty(encoder.metadata.num_bytes(key), dtype=torch.uint8)
    encoder.metadata.fill(block.numpy(), (grid,) * size.items, key)
    return encoder.metadata.kwargs(block.to(encoder.device), key)
