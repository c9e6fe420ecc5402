"""Encoders of transformers and timm as :class:`~mmgraph.protocol.SupportsEncoderCudaGraph`."""

from mmgraph.encoders.calls import CallSignature, TowerCall, TowerSignature
from mmgraph.encoders.discovery import Tower, find_towers
from mmgraph.encoders.inside import eager_towers, inside_tower
from mmgraph.encoders.layouts import encoder_for
from mmgraph.encoders.packed import PackedEncoder
from mmgraph.encoders.rows import RowsEncoder
from mmgraph.encoders.tower import TowerEncoder

__all__ = [
    "CallSignature",
    "PackedEncoder",
    "RowsEncoder",
    "Tower",
    "TowerCall",
    "TowerEncoder",
    "TowerSignature",
    "eager_towers",
    "encoder_for",
    "find_towers",
    "inside_tower",
]
