"""A tower under measurement: one set of weights, a module for each way of running it.

What a reader would get wrong: the twins are no copies of the weights. Each has its own config and
its own methods, so that one can be attached, another have its attention switched, and the first
stay exactly as its library built it, while all read the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mmgraph.attachment import Handle, attach
from mmgraph.bench.sizes import CallSize, ImageSize
from mmgraph.encoders import PackedEncoder, TowerEncoder, encoder_for, find_towers
from mmgraph.recipes import Recipe

__all__ = ["Inputs", "Subject", "open_subject"]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Arguments of one call; every variant of a row reads the same ones.

    Attributes:
        main: Patches (T, P), or pixels or features (B, ...), on the tower's device.
        host_grids: (B, 3) on the CPU, or ``None`` for a rows tower.
        device_grids: The same on the tower's device.
    """

    main: torch.Tensor
    host_grids: torch.Tensor | None
    device_grids: torch.Tensor | None

    def call(self, tower: nn.Module) -> Any:
        """Call an attached `tower`; mmgraph wants its grids on the CPU."""
        if self.host_grids is None:
            return tower(self.main)
        return tower(self.main, grid_thw=self.host_grids)

    def call_eager(self, tower: nn.Module) -> Any:
        """Call a `tower` as its library built it, with the grids where it wants them."""
        if self.device_grids is None:
            return tower(self.main)
        return tower(self.main, grid_thw=self.device_grids)

    def renew(self) -> None:
        """Draw other contents, in place: a graph made by hand reads this very memory."""
        self.main.normal_()

    def widened(self) -> Inputs:
        """The same call in float32."""
        return replace(self, main=self.main.float())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """A tower and its twins.

    Attributes:
        name: Of the recipe.
        tower: As its library builds it.
        reference: A copy in float32.
        precomputed: Twin that takes precomputed metadata.
        exact: Twin that is attached for one size at a time.
        default: Twin that stays attached with the default settings.
        default_handle: Its handle.
        encoder: What mmgraph knows of the tower.
    """

    name: str
    tower: nn.Module
    reference: nn.Module
    precomputed: nn.Module
    exact: nn.Module
    default: nn.Module
    default_handle: Handle
    encoder: TowerEncoder

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.encoder.device

    def sizes(self, images: Sequence[ImageSize], batches: Sequence[int]) -> list[CallSize]:
        """What to call it with: `images` if it is packed, else `batches`."""
        if isinstance(self.encoder, PackedEncoder):
            return [self._packed_size(image, self.encoder) for image in images]
        row = self.encoder.encoder_facts().tokens_per_row
        return [CallSize(label=str(rows), items=rows, tokens=rows * row) for rows in batches]

    def inputs(self, size: CallSize) -> Inputs:
        """Random arguments of a call."""
        encoder = self.encoder
        shape = encoder.example_call()[encoder.signature.main_input].shape[1:]
        rows = size.items if size.grid is None else size.tokens
        main = torch.randn(rows, *shape, device=encoder.device, dtype=encoder.dtype)
        grids = None if size.grid is None else torch.tensor([size.grid] * size.items)
        return Inputs(main, grids, None if grids is None else grids.to(encoder.device))

    def _packed_size(self, image: ImageSize, encoder: PackedEncoder) -> CallSize:
        config: Any = self.tower.config
        grid = image.grid(int(config.patch_size), encoder.metadata.merge_size)
        tokens = image.count * grid[1] * grid[2]
        return CallSize(label=str(image), items=image.count, tokens=tokens, grid=grid)


@contextmanager
def open_subject(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Iterator[Subject]:
    """Build the tower of `recipe` with random weights; its twin is attached within the block."""
    tower = recipe.build_encoder(device=device, dtype=dtype)
    default = _twin(tower)
    with attach(default) as handle:
        yield Subject(
            name=recipe.name,
            tower=tower,
            reference=copy.deepcopy(tower).float(),
            precomputed=_twin(tower),
            exact=_twin(tower),
            default=default,
            default_handle=handle,
            encoder=encoder_for(find_towers(tower)[0]),
        )


def _twin(module: nn.Module) -> nn.Module:
    """A copy of everything but the parameters and buffers, which are shared."""
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
