"""One line for a model of transformers or timm: find its towers, wrap them, restore them."""

from mmgraph.attachment.handle import Handle, attach

__all__ = ["Handle", "attach"]
