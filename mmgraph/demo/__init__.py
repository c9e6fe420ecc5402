"""``mmgraph demo``: real photographs through real model classes, eager beside graphs."""

from mmgraph.demo.main import add_arguments, main

__all__ = ["add_arguments", "main"]
