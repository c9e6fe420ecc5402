"""``mmgraph inspect``: what mmgraph finds in a model and does with it, without its weights."""

from mmgraph.inspect.command import add_arguments, main
from mmgraph.inspect.model import Inspection, inspect_model
from mmgraph.inspect.view import TowerView

__all__ = ["Inspection", "TowerView", "add_arguments", "inspect_model", "main"]
