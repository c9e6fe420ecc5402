"""Models of timm, which are called in two ways."""

from __future__ import annotations

from typing import Any

from tests.registry.entry import Entry
from tests.registry.inputs.images import pixels

__all__ = ["ENTRIES"]


def _timm(model: str, side: int, name: str = "", budget: int = 4, **config: Any) -> Entry:
    return Entry(
        name=f"timm/{name or model}",
        model=model,
        library="timm",
        inputs=pixels(side, name="x"),
        config=config,
        through="forward_features",
        budget=budget,
    )


_THIN: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 4}

ENTRIES = [
    _timm("vit_tiny_patch16_224", 64, img_size=64, **_THIN),
    _timm(
        "vit_tiny_patch16_224",
        64,
        name="vit_tiny_patch16_224+dynamic",
        img_size=64,
        dynamic_img_size=True,
        **_THIN,
    ),
    _timm("vit_so400m_patch14_siglip_224", 56, img_size=56, **_THIN),
    _timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    _timm("vit_pe_core_tiny_patch16_384", 64, img_size=64, depth=2),
    _timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
    _timm(
        "swin_tiny_patch4_window7_224",
        56,
        img_size=56,
        embed_dim=16,
        depths=(1, 1),
        num_heads=(2, 4),
    ),
    _timm("fastvit_t8", 64, layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
    _timm("mobilenetv5_base", 64, budget=2, channel_multiplier=0.125),
    _timm("resnet50", 64, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
]
