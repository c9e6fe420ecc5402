"""What makes graphs of a tower fast, done to the user's own module while one is captured."""

from mmgraph.preparation.blocks import find_blocks
from mmgraph.preparation.preparation import Preparation
from mmgraph.preparation.turns import Turns

__all__ = ["Preparation", "Turns", "find_blocks"]
