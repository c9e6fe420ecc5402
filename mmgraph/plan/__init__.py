"""``mmgraph plan``: budgets fitted to the sizes that calls had."""

from mmgraph.plan.command import add_arguments, main

__all__ = ["add_arguments", "main"]
