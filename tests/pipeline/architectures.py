"""What a model that generates is to these tests, and how one is made and asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.pipeline.media import Medium, prompt
from tests.pipeline.tiny import AUDIO, IMAGE, SPECIAL, VIDEO, tiny_config, tiny_model

NEW_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class with `generate`, tiny.

    Attributes:
        type: Its name in transformers.
        model: Its class.
        changes: Settings of the config that its tiny size needs, by dotted path.
        defaults: Arguments of the config's class, where it makes no tower by itself.
        media: What it is asked about, by name.
        exact: Media for which no budget serves: a graph comes with the second call.
        once_exact: The same with transformers 5.17.
        eager: Media that no graph serves yet, and that had better not be tried on a GPU.
        types: Name of the argument that says which tokens stand for media.
        asked: "about" media that stand in the prompt as tokens, "besides" them, or not at all.
        since: Media that only newer releases of transformers take like this, and which do.
        broken: Media that a release of transformers can't take by itself, and which.
        quick: Media that `make test` asks about; the others are slow.
        seed: Of the weights: one with which the answer varies, over its length and with the media.
    """

    type: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    media: Mapping[str, Medium]
    exact: tuple[str, ...] = ()
    once_exact: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    types: str | None = None
    asked: str | None = "about"
    since: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    broken: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    quick: tuple[str, ...] = ()
    seed: int = 0

    def build(self, device: str) -> Any:
        """The model with weights that don't depend on the device."""
        config = tiny_config(self.type, self.changes, **self.defaults)
        return tiny_model(self.model, config, self.seed).to(device)

    def inputs(self, medium: str, device: str, seed: int) -> dict[str, torch.Tensor]:
        """Arguments of `generate`: whatever the seed, the same prompt, but about other media."""
        generator = torch.Generator().manual_seed(seed)
        tensors, groups = self.media[medium](
            lambda *shape: torch.randn(*shape, generator=generator)
        )
        inputs = dict(tensors)
        if self.asked is not None:
            ids = prompt(groups if self.asked == "about" else [])
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            inputs |= self._types_of(ids)
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _types_of(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.types is None:
            return {}
        kinds = [(ids == kind).long() * (i + 1) for i, kind in enumerate((IMAGE, VIDEO, AUDIO))]
        return {self.types: kinds[0] + kinds[1] + kinds[2]}


@dataclass(frozen=True)
class Answer:
    """Ids that a model gave, and the logits (steps, B, V) that they were chosen by."""

    ids: torch.Tensor
    logits: torch.Tensor


def generate(model: Any, inputs: Mapping[str, torch.Tensor]) -> Answer:
    """Return what greedy decoding gives, all of `NEW_TOKENS`."""
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        suppress_tokens=list(SPECIAL),
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Answer(output.sequences[:, -NEW_TOKENS:], torch.stack(output.logits))
