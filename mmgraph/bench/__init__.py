"""`mmgraph bench`: encoders in eager mode, from a graph made by hand, and from mmgraph's graphs.

Everything that a row compares is measured side by side in one process, on the same weights and the
same inputs, and judged against a float32 twin of the tower.
"""

from mmgraph.bench.command import add_arguments, main
from mmgraph.bench.kernels import kernel_times
from mmgraph.bench.results import Report, Row
from mmgraph.bench.run import run

__all__ = ["Report", "Row", "add_arguments", "kernel_times", "main", "run"]
