"""Encoders of transformers and timm as :class:`~mmgraph.protocol.SupportsEncoderCudaGraph`."""

from mmgraph.encoders.attention import use_attention_implementation
from mmgraph.encoders.calls import CallSignature, TowerCall, TowerSignature
from mmgraph.encoders.discovery import Tower, find_towers
from mmgraph.encoders.packed import PackedEncoder
from mmgraph.encoders.placement import first_parameter, placement_problem
from mmgraph.encoders.rows import RowsEncoder
from mmgraph.encoders.tower import TowerEncoder, eager_towers, encoder_for, inside_tower
from mmgraph.encoders.watch import TowerWatch

__all__ = [
    "CallSignature",
    "PackedEncoder",
    "RowsEncoder",
    "Tower",
    "TowerCall",
    "TowerEncoder",
    "TowerSignature",
    "TowerWatch",
    "eager_towers",
    "encoder_for",
    "find_towers",
    "first_parameter",
    "inside_tower",
    "placement_problem",
    "use_attention_implementation",
]
