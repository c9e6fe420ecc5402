"""One line for a model of transformers or timm: find its towers, wrap them, restore them."""

from mmgraph.attachment.attach import attach
from mmgraph.attachment.handle import Handle
from mmgraph.attachment.lifetime import shutdown

__all__ = ["Handle", "attach", "shutdown"]
