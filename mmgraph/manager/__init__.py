"""Graphs by key: capture, dispatch, statistics; knows nothing of which model it is."""

from mmgraph.manager.manager import EncoderCudaGraphManager
from mmgraph.manager.planned import Eager, Plan, Replay
from mmgraph.manager.upfront import estimate

__all__ = ["Eager", "EncoderCudaGraphManager", "Plan", "Replay", "estimate"]
