"""Recording and replaying callables as graphs; knows nothing of encoders, budgets or models."""

from mmgraph.graphs.backend import CapturedGraph, GraphBackend
from mmgraph.graphs.buffers import BufferArena, StaticBuffers
from mmgraph.graphs.gc_freeze import freeze_gc_for_cudagraph_capture
from mmgraph.graphs.modes import (
    BatchDescriptor,
    CUDAGraphMode,
    ForwardContext,
    current_forward_context,
    forward_context,
)
from mmgraph.graphs.segments import break_at_modules, eager_break
from mmgraph.graphs.select import select_backend
from mmgraph.graphs.wrapper import BreakableCUDAGraphWrapper, CUDAGraphWrapper

__all__ = [
    "BatchDescriptor",
    "BreakableCUDAGraphWrapper",
    "BufferArena",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CapturedGraph",
    "ForwardContext",
    "GraphBackend",
    "StaticBuffers",
    "break_at_modules",
    "current_forward_context",
    "eager_break",
    "forward_context",
    "freeze_gc_for_cudagraph_capture",
    "select_backend",
]
