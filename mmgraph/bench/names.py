"""Names of what a row compares: in `bench.json`, for people, and on the command line."""

from __future__ import annotations

__all__ = [
    "BASELINES",
    "BOUND",
    "COMPILE",
    "COMPILE_MAX_AUTOTUNE",
    "COMPILE_REDUCE_OVERHEAD",
    "DEFAULT",
    "EAGER",
    "EXACT",
    "HAND_MADE",
    "LABELS",
    "METADATA",
    "POWER_OF_TWO",
]

EAGER = "eager"
METADATA = "eager_metadata"
COMPILE = "compile"
COMPILE_REDUCE_OVERHEAD = "compile_reduce_overhead"
COMPILE_MAX_AUTOTUNE = "compile_max_autotune"
HAND_MADE = "hand_made"
POWER_OF_TWO = "power_of_two"
EXACT = "mmgraph_exact"
DEFAULT = "mmgraph_default"
BOUND = "bound"

LABELS = {
    EAGER: "eager",
    METADATA: "eager+metadata",
    COMPILE: "torch.compile",
    COMPILE_REDUCE_OVERHEAD: "torch.compile reduce-overhead",
    COMPILE_MAX_AUTOTUNE: "torch.compile max-autotune",
    HAND_MADE: "hand-made graph",
    POWER_OF_TWO: "power-of-two graphs",
    EXACT: "mmgraph, exact budget",
    DEFAULT: "mmgraph, default budgets",
    BOUND: "practical bound",
}
"""For people, by variant, in the order of a table."""

BASELINES = {
    "metadata": METADATA,
    "graph": HAND_MADE,
    "power-of-two": POWER_OF_TWO,
    "compile": COMPILE,
    "compile-reduce-overhead": COMPILE_REDUCE_OVERHEAD,
    "compile-max-autotune": COMPILE_MAX_AUTOTUNE,
    "bound": BOUND,
}
"""Variants that can be left out, by what the command line calls them."""
