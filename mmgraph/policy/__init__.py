"""Decisions in pure Python: which budgets to capture, and which items to replay together."""

from mmgraph.policy.budgets import ladder, segment_tier, seqlen_tier, smallest_fit, squared
from mmgraph.policy.curve import Curve
from mmgraph.policy.fit import (
    EAGER,
    REPLAY,
    Cost,
    Expectation,
    LinearCost,
    as_replays,
    expect,
    fit,
)
from mmgraph.policy.packing import Bin, Packing, pack

__all__ = [
    "EAGER",
    "REPLAY",
    "Bin",
    "Cost",
    "Curve",
    "Expectation",
    "LinearCost",
    "Packing",
    "as_replays",
    "expect",
    "fit",
    "ladder",
    "pack",
    "segment_tier",
    "seqlen_tier",
    "smallest_fit",
    "squared",
]
