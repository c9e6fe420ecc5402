"""How much memory an encoder's graphs may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmgraph.types import GraphKey

__all__ = ["Limit"]


class Limit:
    """A bound on the bytes of graphs and buffers, and who shares it with the graphs of budgets.

    Attributes:
        max_bytes: The bound; ``None`` for none.
        others: Bytes of those that share it.
        reclaim: Makes them give way, as far as is needed.
        freed: Called with the keys of graphs that had to go.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.others: Callable[[], int] = lambda: 0
        self.reclaim: Callable[[], None] = lambda: None
        self.freed: Callable[[Sequence[GraphKey]], None] = lambda _: None

    def is_exceeded_by(self, num_bytes: int) -> bool:
        """Whether `num_bytes`, with those of the others, are more than there may be."""
        return self.max_bytes is not None and num_bytes + self.others() > self.max_bytes
