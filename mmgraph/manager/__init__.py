"""Graphs by key: capture, dispatch, statistics; knows nothing of which model it is."""

from mmgraph.manager.manager import EncoderCudaGraphManager
from mmgraph.manager.plan import Eager, Plan, Replay

__all__ = ["Eager", "EncoderCudaGraphManager", "Plan", "Replay"]
