"""One tiny tower of each layout, and calls of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph import Refusal
from mmgraph.encoders import TowerEncoder, encoder_for, find_towers
from mmgraph.recipes import load_recipe

GRIDS = [(1, 4, 4), (2, 2, 4), (1, 6, 2)]
OFFSETS = [0, 16, 32, 44]
LAYOUTS = {"rows": "vit:tiny", "packed": "qwen2_vl:tiny"}
TOKENS_PER_ROW = 16


def make_encoder(layout: str) -> TowerEncoder:
    (tower,) = find_towers(load_recipe(LAYOUTS[layout]).build_encoder())
    return encoder_for(tower)


def call_of(layout: str, num_items: int = 3) -> dict[str, Any]:
    """Every number in it is another, so that a row in the wrong place shows."""
    if layout == "rows":
        numbers = torch.arange(float(num_items * 3 * 64 * 64))
        return {"pixel_values": numbers.reshape(num_items, 3, 64, 64) / numbers.numel()}
    rows = OFFSETS[num_items]
    return {
        "hidden_states": torch.arange(float(rows * 1176)).reshape(rows, 1176) / (rows * 1176),
        "grid_thw": torch.tensor(GRIDS[:num_items]).reshape(-1, 3),
    }


def refusal_of(encoder: TowerEncoder, call: dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        encoder.item_specs(call)
    return caught.value
