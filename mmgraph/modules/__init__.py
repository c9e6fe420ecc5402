"""What a module holds, keeps and names, whatever it computes; knows nothing of calls or layouts."""

from mmgraph.modules.attention import use_attention_implementation
from mmgraph.modules.placement import first_parameter, placement_problem
from mmgraph.modules.watch import TowerWatch

__all__ = [
    "TowerWatch",
    "first_parameter",
    "placement_problem",
    "use_attention_implementation",
]
