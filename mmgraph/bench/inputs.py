"""Arguments of towers whose recipe says what each of them holds.

The two layouts know one argument, with or without a grid. Other towers take pixels, patches or mel
frames together with sizes, positions or masks of their own; a recipe says which, in a few words::

    "inputs": {"pixel_values": "padded_patches", "pixel_position_ids": "padded_positions"},
    "input_facts": {"merge": 3, "length": 2520}

Contents are random; names, shapes and dtypes are those of the processors of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmgraph.errors import ConfigError
from mmgraph.recipes import Recipe

__all__ = ["ItemSize", "full_item", "on_host", "tower_inputs"]

ItemSize = tuple[int, ...]
"""(t, h, w) of an image (t = 1) or video in patches, (frames,) of a clip in mel frames."""

_PADDING = -1  # the position of a patch that no image has


def tower_inputs(
    recipe: Recipe,
    config: Any,
    items: Sequence[ItemSize],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> dict[str, torch.Tensor]:
    """Arguments of one call of a tower.

    Args:
        recipe: Of the tower; it has `inputs`.
        config: The tower's own.
        items: Sizes of the images, videos or clips in the call, in their order.
        device: Where random contents are drawn. Integers and masks are made on the CPU.
        dtype: Of random contents.
        generator: Of random contents, on `device`; by default torch's own.

    Returns:
        Tensors by argument, in the order of the recipe, which begins with the main input.

    Raises:
        ConfigError: The recipe has no inputs, or an image has more patches than it is padded to.
    """
    if not recipe.inputs:
        raise ConfigError(
            f"{recipe.name} declares no inputs: its layout, {recipe.layout!r}, says what it takes"
        )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    call = _Call(recipe.name, config, recipe.input_facts, tuple(items), random)
    return {name: _KINDS[kind](call) for name, kind in recipe.inputs.items()}


def full_item(recipe: Recipe, config: Any) -> ItemSize:
    """The usual item of a recipe whose items have no size of their own.

    That is the square image that its image processor makes of every square one, or a clip of the
    usual length.
    """
    length = recipe.input_facts["length"]
    if not hasattr(config, "patch_size"):
        return (length,)
    merge = recipe.input_facts.get("merge", 1)
    side = math.isqrt(length) // merge * merge
    return (1, side, side)


def on_host(recipe: Recipe) -> frozenset[str]:
    """Arguments that say how large the items are, which mmgraph reads on the host."""
    return frozenset(name for name, kind in recipe.inputs.items() if kind in _SIZES)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the makers below read."""

    name: str
    config: Any
    facts: Mapping[str, int]
    items: tuple[ItemSize, ...]
    random: Callable[..., torch.Tensor]

    @property
    def channels(self) -> int:
        return int(getattr(self.config, "num_channels", 3))

    @property
    def patch(self) -> int:
        return int(self.config.patch_size)

    @property
    def patch_numbers(self) -> int:
        return self.channels * self.patch**2

    @property
    def num_patches(self) -> int:
        """Patches that every image is padded to."""
        length, longest = self.facts["length"], max(map(math.prod, self.items), default=0)
        if longest > length:
            raise ConfigError(f"{self.name} pads images to {length} patches, one has {longest}")
        return length

    @property
    def num_frames(self) -> int:
        """Mel frames of the longest clip, and up to the next whole chunk."""
        longest, multiple = max(map(math.prod, self.items), default=0), self.facts["multiple"]
        return -(-longest // multiple) * multiple


def _pixels(call: _Call) -> torch.Tensor:
    """(B, 3, H, W), each image in the upper left corner, zero beyond it."""
    sizes = _pixel_sizes(call).tolist()
    height, width = (max((size[axis] for size in sizes), default=0) for axis in (0, 1))
    pixels = call.random(len(sizes), call.channels, height, width)
    for image, (h, w) in zip(pixels, sizes, strict=True):
        image[:, h:] = 0
        image[:, :, w:] = 0
    return pixels


def _pixel_sizes(call: _Call) -> torch.Tensor:
    """(B, 2) int64 height and width in pixels."""
    sizes = [(h * call.patch, w * call.patch) for _, h, w in call.items]
    return torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)


def _patches(call: _Call) -> torch.Tensor:
    """(T, 3 * P * P), the items end to end."""
    return call.random(sum(map(math.prod, call.items)), call.patch_numbers)


def _grids(call: _Call) -> torch.Tensor:
    """(B, 3) int64 (t, h, w) in patches."""
    return torch.tensor(call.items, dtype=torch.int64).reshape(-1, 3)


def _merges(call: _Call) -> torch.Tensor:
    """(B,) int64 side of the groups of patches that become one token."""
    return torch.full((len(call.items),), call.facts.get("merge", 1), dtype=torch.int64)


def _padded_patches(call: _Call) -> torch.Tensor:
    """(B, T, 3 * P * P) from 0 to 1, zero beyond an image's own patches."""
    patches = call.random(len(call.items), call.num_patches, call.patch_numbers).sigmoid_()
    for row, item in zip(patches, call.items, strict=True):
        row[math.prod(item) :] = 0
    return patches


def _padded_positions(call: _Call) -> torch.Tensor:
    """(B, T, 2) int64 (x, y) of each patch, -1 beyond an image's own."""
    positions = torch.full((len(call.items), call.num_patches, 2), _PADDING, dtype=torch.int64)
    for row, (_, h, w) in zip(positions, call.items, strict=True):
        x, y = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy")
        row[: h * w] = torch.stack((x.flatten(), y.flatten()), dim=-1)
    return positions


def _mel(call: _Call) -> torch.Tensor:
    """(B, C, F) log-mel frames, zero beyond a clip's own."""
    frames = call.random(len(call.items), int(call.config.num_mel_bins), call.num_frames)
    for clip, (num_frames,) in zip(frames, call.items, strict=True):
        clip[:, num_frames:] = 0
    return frames


def _mel_mask(call: _Call) -> torch.Tensor:
    """(B, F) int32, 1 for a clip's own frames and 0 beyond them."""
    mask = torch.zeros(len(call.items), call.num_frames, dtype=torch.int32)
    for clip, (num_frames,) in zip(mask, call.items, strict=True):
        clip[:num_frames] = 1
    return mask


_KINDS: Mapping[str, Callable[[_Call], torch.Tensor]] = {
    "grids": _grids,
    "mel": _mel,
    "mel_mask": _mel_mask,
    "merges": _merges,
    "padded_patches": _padded_patches,
    "padded_positions": _padded_positions,
    "patches": _patches,
    "pixel_sizes": _pixel_sizes,
    "pixels": _pixels,
}
_SIZES = frozenset({"grids", "merges", "pixel_sizes"})
