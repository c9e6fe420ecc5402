"""A tower under measurement: one set of weights, a module for each way of running it.

What a reader would get wrong: the twins are no copies of the weights. Each has its own config and
its own methods, so that one can be attached, another have its attention switched, and the first
stay exactly as its library built it, while all read the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mmgraph.attachment import Handle, attach
from mmgraph.bench.inputs import ItemSize, full_item, on_host, tower_inputs
from mmgraph.bench.sizes import CallSize, ImageSize
from mmgraph.config import GraphConfig
from mmgraph.encoders import PackedEncoder, TowerEncoder, encoder_for, find_towers
from mmgraph.recipes import Recipe

__all__ = ["Inputs", "Subject", "open_subject"]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Arguments of one call; every variant of a row reads the same ones.

    Attributes:
        main: Patches (T, P), or pixels or features (B, ...), on the tower's device.
        ours: The other arguments, with the sizes of items (grids) on the CPU.
        theirs: The same, all on the tower's device.
    """

    main: torch.Tensor
    ours: Mapping[str, torch.Tensor]
    theirs: Mapping[str, torch.Tensor]

    def call(self, tower: nn.Module) -> Any:
        """Call an attached `tower`; mmgraph wants its grids on the CPU."""
        return tower(self.main, **self.ours)

    def call_eager(self, tower: nn.Module) -> Any:
        """Call a `tower` as its library built it, with the grids where it wants them."""
        return tower(self.main, **self.theirs)

    def renew(self, seed: int) -> None:
        """Draw other contents, in place: a graph made by hand reads this very memory."""
        self.main.normal_(generator=torch.Generator(self.main.device).manual_seed(seed))

    def widened(self) -> Inputs:
        """The same call in float32."""
        return replace(self, main=self.main.float())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """A tower and its twins.

    Attributes:
        recipe: What is measured.
        tower: As its library builds it.
        reference: A copy in float32.
        exact: Twin that is attached for one size at a time.
        default: Twin that stays attached with the default settings.
        default_handle: Its handle.
        encoder: What mmgraph knows of the tower.
    """

    recipe: Recipe
    tower: nn.Module
    reference: nn.Module
    exact: nn.Module
    default: nn.Module
    default_handle: Handle
    encoder: TowerEncoder

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.recipe.name

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.encoder.device

    @property
    def whole(self) -> bool:
        """Whether one graph can hold the whole tower: no, where its inputs fit no layout."""
        return not self.recipe.inputs

    def twin(self) -> nn.Module:
        """Make another twin, for a way of running the tower that changes it."""
        return _twin(self.tower)

    def sizes(self, images: Sequence[ImageSize], batches: Sequence[int]) -> list[CallSize]:
        """What to call it with: `images` if those have sizes of their own here, else `batches`."""
        tokens = self._tokens_per_row()
        if tokens is None:
            return [self._image_size(image) for image in images]
        return [CallSize(label=str(rows), items=rows, tokens=rows * tokens) for rows in batches]

    def inputs(self, size: CallSize) -> Inputs:
        """Random arguments of a call."""
        encoder, grid = self.encoder, size.grid
        if self.recipe.inputs:
            return self._declared_inputs(grid or full_item(self.recipe, self._config), size.items)
        shape = encoder.example_call()[encoder.signature.main_input].shape[1:]
        rows = size.items if grid is None else size.tokens
        main = torch.randn(rows, *shape, device=encoder.device, dtype=encoder.dtype)
        if grid is None:
            return Inputs(main, {}, {})
        grids = torch.tensor([grid] * size.items)
        return Inputs(main, {"grid_thw": grids}, {"grid_thw": grids.to(encoder.device)})

    @property
    def _config(self) -> Any:
        return self.tower.config

    def _declared_inputs(self, item: ItemSize, count: int) -> Inputs:
        device = self.encoder.device
        arguments = tower_inputs(
            self.recipe, self._config, [item] * count, device=device, dtype=self.encoder.dtype
        )
        main = arguments.pop(self.encoder.signature.main_input)
        theirs = {name: value.to(device) for name, value in arguments.items()}
        sizes = on_host(self.recipe)
        ours = {name: arguments[name] if name in sizes else theirs[name] for name in arguments}
        return Inputs(main, ours, theirs)

    def _tokens_per_row(self) -> int | None:
        """Tokens of every item, ``None`` where items have sizes of their own."""
        if self.recipe.inputs:
            return self.recipe.input_facts.get("length")
        if isinstance(self.encoder, PackedEncoder):
            return None
        return self.encoder.encoder_facts().tokens_per_row

    def _image_size(self, image: ImageSize) -> CallSize:
        merge = self.recipe.input_facts.get("merge", 1)
        if isinstance(self.encoder, PackedEncoder) and not self.recipe.inputs:
            merge = self.encoder.metadata.merge_size
        grid = image.grid(int(self._config.patch_size), merge)
        tokens = image.count * grid[1] * grid[2]
        return CallSize(label=str(image), items=image.count, tokens=tokens, grid=grid)


@contextmanager
def open_subject(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Iterator[Subject]:
    """Build the tower of `recipe` with random weights; its twin is attached within the block."""
    tower = recipe.build_encoder(device=device, dtype=dtype)
    default = _twin(tower)
    # A graph of exactly the size would come by itself after a few calls; that is the other variant.
    with attach(default, GraphConfig(exact_after=0)) as handle:
        yield Subject(
            recipe=recipe,
            tower=tower,
            reference=copy.deepcopy(tower).float(),
            exact=_twin(tower),
            default=default,
            default_handle=handle,
            encoder=encoder_for(find_towers(tower)[0]),
        )


def _twin(module: nn.Module) -> nn.Module:
    """A copy of everything but the parameters and buffers, which are shared."""
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
