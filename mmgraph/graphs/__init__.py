"""Recording and replaying callables as graphs; knows nothing of encoders, budgets or models."""

from mmgraph.graphs.backend import CapturedGraph, GraphBackend
from mmgraph.graphs.buffers import BufferArena, StaticBuffers
from mmgraph.graphs.exact import capture_exact, capture_folded
from mmgraph.graphs.gc_freeze import clean_up, freeze_gc_for_cudagraph_capture
from mmgraph.graphs.guard import HostAccess
from mmgraph.graphs.modes import (
    BatchDescriptor,
    CUDAGraphMode,
    ForwardContext,
    GraphLog,
    current_forward_context,
    forward_context,
)
from mmgraph.graphs.operations import ReadsContents
from mmgraph.graphs.regions import in_region
from mmgraph.graphs.segments import BreakableGraph, break_at_modules, eager_break
from mmgraph.graphs.select import select_backend
from mmgraph.graphs.trees import Rebuild, flatten
from mmgraph.graphs.wrapper import BreakableCUDAGraphWrapper, CUDAGraphWrapper

__all__ = [
    "BatchDescriptor",
    "BreakableCUDAGraphWrapper",
    "BreakableGraph",
    "BufferArena",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CapturedGraph",
    "ForwardContext",
    "GraphBackend",
    "GraphLog",
    "HostAccess",
    "ReadsContents",
    "Rebuild",
    "StaticBuffers",
    "break_at_modules",
    "capture_exact",
    "capture_folded",
    "clean_up",
    "current_forward_context",
    "eager_break",
    "flatten",
    "forward_context",
    "freeze_gc_for_cudagraph_capture",
    "in_region",
    "select_backend",
]
