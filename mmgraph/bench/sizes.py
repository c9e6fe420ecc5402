"""What one call holds: images of a size for packed towers, a number of rows for the others."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmgraph.encoders.metadata import Grid

__all__ = ["CallSize", "ImageSize", "parse_image"]

_IMAGE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Square images in one call.

    Attributes:
        side: Height and width in pixels.
        count: How many.
    """

    side: int
    count: int = 1

    def __str__(self) -> str:
        return str(self.side) if self.count == 1 else f"{self.side}x{self.count}"

    def grid(self, patch_size: int, merge_size: int) -> Grid:
        """(1, h, w) in patches; as image processors do it, sides are rounded to merge groups."""
        side = max(1, round(self.side / (patch_size * merge_size))) * merge_size
        return (1, side, side)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSize:
    """One row of the benchmark.

    Attributes:
        label: For people: "448x4", or the batch size.
        items: Images, clips or rows in the call.
        tokens: The tower's own rows (packed patches, or rows x tokens a row).
        grid: (t, h, w) of each item of a packed tower.
    """

    label: str
    items: int
    tokens: int
    grid: Grid | None = None


def parse_image(text: str) -> ImageSize:
    """Read "448" or "448x4": SIZE[xCOUNT].

    Raises:
        ValueError: It is neither.
    """
    found = _IMAGE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected SIZE or SIZExCOUNT, such as 448 or 448x4, got {text!r}")
    return ImageSize(int(found[1]), int(found[2] or 1))
