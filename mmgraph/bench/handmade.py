"""The yardstick: what a graph costs without mmgraph around it.

This file uses nothing of mmgraph's graphs, on purpose. A replay here copies nothing in or out, so
what mmgraph takes longer is its own: planning, metadata, and the copies of inputs and outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Subject
from mmgraph.bench.timing import Call
from mmgraph.encoders import PackedEncoder
from mmgraph.types import GraphKey

__all__ = ["capture_by_hand", "precomputed_metadata"]

_WARMUP_CALLS = 3


def capture_by_hand(call: Call) -> Call:
    """Record `call` as PyTorch's manual shows it; return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def precomputed_metadata(subject: Subject, size: CallSize) -> dict[str, Any]:
    """The data-dependent arguments of a packed tower, on its device, for exactly this call."""
    encoder, grid = subject.encoder, size.grid
    assert isinstance(encoder, PackedEncoder), "a rows tower has no metadata"
    assert grid is not None, "a packed tower has a grid"
    item = encoder.metadata.item(grid)
    assert item is not None, "image sizes are rounded to merge groups"
    key = GraphKey(size.tokens, tuple(n * size.items for n in item.num_segments), item.max_seqlen)
    block = torch.empty(encoder.metadata.num_bytes(key), dtype=torch.uint8)
    encoder.metadata.fill(block.numpy(), (grid,) * size.items, key)
    return encoder.metadata.kwargs(block.to(encoder.device), key)
