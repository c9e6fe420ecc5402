"""Towers of patches padded to one length, with masks, sizes or positions."""

from __future__ import annotations

from tests.registry.entries.shared import GEMMA4
from tests.registry.entry import Entry
from tests.registry.inputs.patches import naflex, padded, padded_positions

__all__ = ["ENTRIES"]

ENTRIES = [
    Entry(
        name="siglip2",
        model="siglip2",
        inputs=padded(16, 64),
        config={"vision_config.num_patches": 64},
    ),
    Entry(
        name="siglip2_vision_model",
        model="siglip2_vision_model",
        inputs=padded(16, 64),
        config={"num_patches": 64},
        through="tower",
    ),
    Entry(
        name="lfm2_vl",
        model="lfm2_vl",
        inputs=padded(16, 64),
        config={"vision_config.num_patches": 64},
    ),
    Entry(
        name="gemma4",
        model="gemma4",
        inputs=padded_positions(
            16, 72, ((1, 6, 6), (1, 3, 6)), ("pixel_values", "image_position_ids")
        ),
        start=GEMMA4,
        tower="vision_tower",
    ),
    *(
        Entry(
            name=f"timm/{model}",
            model=model,
            library="timm",
            inputs=naflex(16, 64),
            config={"depth": 2, "embed_dim": 64, "num_heads": 4},
            through="forward_features",
        )
        for model in ("naflexvit_base_patch16_siglip", "naflexvit_base_patch16_gap")
    ),
]
