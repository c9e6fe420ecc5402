"""timm's models, tiny, and the ways in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch

from tests.pipeline.tiny import draw_weights

_SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 4}
_STAGES: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}
_WINDOWS: dict[str, Any] = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}


@dataclass(frozen=True, kw_only=True)
class Timm:
    """An architecture of timm.

    Attributes:
        name: As timm spells it.
        side: Of its images.
        arguments: Of ``create_model``, besides no classes.
        quick: Whether `make test` tries it.
    """

    name: str
    side: int
    arguments: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    def build(self, device: str, **more: Any) -> Any:
        model = timm.create_model(self.name, **{"num_classes": 0, **self.arguments, **more})
        draw_weights(model, seed=0)
        return model.eval().to(device)

    def images(self, count: int, device: str, seed: int = 0) -> torch.Tensor:
        return images(count, (self.side, self.side), device, seed)


MODELS = {
    # the plain one, with its class token
    "vit": Timm(
        name="vit_tiny_patch16_224", side=64, arguments={"img_size": 64, **_SMALL}, quick=True
    ),
    # a classifier
    "vit with a head": Timm(
        name="vit_tiny_patch16_224",
        side=64,
        arguments={"img_size": 64, "num_classes": 10, **_SMALL},
    ),
    # every token comes back
    "vit without pooling": Timm(
        name="vit_tiny_patch16_224",
        side=64,
        arguments={"img_size": 64, "global_pool": "", **_SMALL},
    ),
    # four registers before the patches
    "dinov2 with registers": Timm(
        name="vit_small_patch14_reg4_dinov2", side=56, arguments={"img_size": 56, **_SMALL}
    ),
    # pooled by attention
    "siglip": Timm(
        name="vit_base_patch16_siglip_224", side=64, arguments={"img_size": 64, **_SMALL}
    ),
    # rotary positions
    "eva": Timm(
        name="eva02_tiny_patch14_224", side=56, arguments={"img_size": 56, **_SMALL}, quick=True
    ),
    "perception encoder": Timm(
        name="vit_pe_core_tiny_patch16_384", side=64, arguments={"img_size": 64, **_SMALL}
    ),
    # a relative bias
    "beit": Timm(name="beit_base_patch16_224", side=64, arguments={"img_size": 64, **_SMALL}),
    # windows, shifted
    "swin": Timm(
        name="swin_tiny_patch4_window7_224",
        side=56,
        arguments={"img_size": 56, **_WINDOWS},
        quick=True,
    ),
    # convolutions
    "convnext": Timm(name="convnext_atto", side=64, arguments=_STAGES, quick=True),
    "resnet": Timm(name="test_resnet", side=64),
    "efficientnet": Timm(name="test_efficientnet", side=64),
    # both
    "maxvit": Timm(name="test_maxvit", side=160),
    # one forward for images and for patches of any size
    "naflexvit": Timm(name="naflexvit_base_patch16_siglip", side=64, arguments=_SMALL),
}

WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "forward": lambda model, x: model(x),
    "forward_features": lambda model, x: model.forward_features(x),
    "forward_intermediates": lambda model, x: model.forward_intermediates(x),
    "the last block alone": lambda model, x: model.forward_intermediates(
        x, indices=1, stop_early=True, intermediates_only=True
    ),
    "two blocks as tokens": lambda model, x: model.forward_intermediates(
        x, indices=[0, 1], norm=True, output_fmt="NLC"
    ),
    "a dict": lambda model, x: model.forward_intermediates(x, output_dict=True),
    "get_intermediate_layers": lambda model, x: model.get_intermediate_layers(
        x, n=2, reshape=True, return_prefix_tokens=True
    ),
}

_MAPS_ONLY = {"swin", "convnext", "resnet", "efficientnet", "maxvit"}
_PLAIN_VITS = {
    *("vit", "vit with a head", "vit without pooling", "dinov2 with registers", "siglip"),
}
_LACKS = {
    "two blocks as tokens": _MAPS_ONLY,
    "a dict": MODELS.keys() - _PLAIN_VITS - {"naflexvit"},
    "get_intermediate_layers": MODELS.keys() - _PLAIN_VITS,
}


def pairs() -> list[tuple[str, str]]:
    """Every model that the installed timm has, with every way that it has."""
    here = [name for name, model in MODELS.items() if timm.is_model(model.name)]
    return [(m, way) for m in here for way in WAYS if m not in _LACKS.get(way, ())]


def images(count: int, size: tuple[int, int], device: str, seed: int = 0) -> torch.Tensor:
    """Random pixels (count, 3, H, W)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, *size, generator=generator).to(device)
