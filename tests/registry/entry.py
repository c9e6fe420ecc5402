"""What the registry knows of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Call", "Draw", "Entry", "Inputs", "Size"]

Size = tuple[int, ...]
"""Of one item; what the numbers mean is up to its kind of inputs, () where all are alike."""
Call = dict[str, Any]


class Draw:
    """Random contents: other ones each time, the same ones in each process."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)


@dataclass(frozen=True)
class Inputs:
    """What calls of an encoder take.

    Attributes:
        kind: In a few words, for the table.
        make: Given the model, the sizes of the items and random contents, the arguments.
        mixed: Sizes of a few items, not all alike where the encoder lets them differ. The first
            ones alone make a call as well.
        may_be_nan: Whether contents may be; not where they hold positions.
    """

    kind: str
    make: Callable[[nn.Module, Sequence[Size], Draw], Call]
    mixed: tuple[Size, ...]
    may_be_nan: bool = True


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An encoder, the tiny model that holds it, and how it is called.

    Attributes:
        name: Of the architecture; with the modality behind a slash where it has several.
        model: Its type in transformers, or its name in timm.
        inputs: What it takes.
        modality: "image", "video" or "audio".
        config: What its config has instead of the shrunk defaults, by dotted path; for timm
            arguments of ``create_model``.
        start: What its config class is called with, where its defaults leave something out.
        model_class: In transformers, if it isn't what ``AutoModel`` makes.
        library: Where it is from.
        through: What is called: "features" (``get_image_features`` or a sibling of it), "tower",
            or another method of the model.
        tower: Path of the tower, or how it ends; ``None`` if there is one only.
        budget: Of the one graph of budgets that it gets: rows, or tokens if it is packed.
        since: First version of the library seen to run it, if the oldest we support doesn't.
        eager: Why no graph serves it; empty if one does.
        eager_before: The same for versions of the library before the first of the two.
    """

    name: str
    model: str
    inputs: Inputs
    modality: Literal["image", "video", "audio"] = "image"
    config: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    model_class: str | None = None
    library: Literal["transformers", "timm"] = "transformers"
    through: str = "features"
    tower: str | None = None
    budget: int = 4
    since: str = ""
    eager: str = ""
    eager_before: tuple[str, str] = ("0.0", "")
