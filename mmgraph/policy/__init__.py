"""Decisions in pure Python: which budgets to capture, and which items to replay together."""

from mmgraph.policy.budgets import ladder, segment_tier, seqlen_tier, smallest_fit
from mmgraph.policy.packing import Bin, Packing, pack

__all__ = ["Bin", "Packing", "ladder", "pack", "segment_tier", "seqlen_tier", "smallest_fit"]
