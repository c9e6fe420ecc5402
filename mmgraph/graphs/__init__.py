"""Recording and replaying callables as graphs; knows nothing of encoders, budgets or models."""

from mmgraph.graphs.backend import CapturedGraph, GraphBackend
from mmgraph.graphs.buffers import BufferArena, StaticBuffers
from mmgraph.graphs.gc_freeze import freeze_gc_for_cudagraph_capture
from mmgraph.graphs.select import select_backend

__all__ = [
    "BufferArena",
    "CapturedGraph",
    "GraphBackend",
    "StaticBuffers",
    "freeze_gc_for_cudagraph_capture",
    "select_backend",
]
