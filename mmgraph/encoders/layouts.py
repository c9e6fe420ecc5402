"""The encoder of each layout."""

from __future__ import annotations

from mmgraph.encoders.discovery import Tower
from mmgraph.encoders.packed import PackedEncoder
from mmgraph.encoders.rows import RowsEncoder
from mmgraph.encoders.tower import TowerEncoder
from mmgraph.modules.watch import TowerWatch
from mmgraph.preparation import Preparation

__all__ = ["encoder_for"]

_BY_LAYOUT: dict[str, type[TowerEncoder]] = {"packed": PackedEncoder, "rows": RowsEncoder}


def encoder_for(
    tower: Tower,
    method: str = "forward",
    preparation: Preparation | None = None,
    watch: TowerWatch | None = None,
) -> TowerEncoder:
    """Return the encoder for the layout of `tower`; without `preparation` it is left as it is."""
    return _BY_LAYOUT[tower.layout](tower, method, preparation, watch)
