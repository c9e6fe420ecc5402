"""Images, videos and sounds as a processor hands them to a model, made by hand.

A medium is a function of a source of random numbers; it returns the model's tensors, and for each
picture or sound the token that stands for it in the prompt and how many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.pipeline.tiny import AUDIO, BOS, END, IMAGE, START, VIDEO, WORDS

Tensors = dict[str, torch.Tensor]
Groups = list[tuple[int, int]]
Draw = Callable[..., torch.Tensor]
Medium = Callable[[Draw], tuple[Tensors, Groups]]
Grid = tuple[int, int, int]

IMAGES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")
TWO_IMAGES: tuple[Grid, ...] = ((1, 4, 6), (1, 6, 4))
ONE_VIDEO: tuple[Grid, ...] = ((2, 4, 4),)


def patches(
    patch: tuple[int, ...],
    grids: Sequence[Grid] = TWO_IMAGES,
    *,
    names: tuple[str, str] = IMAGES,
    token: int = IMAGE,
    merge: int = 4,
    by_frame: bool = False,
    more: Tensors | None = None,
) -> Medium:
    """Patches of all items end to end, with a grid (t, h, w) an item.

    Args:
        patch: Shape of one.
        grids: One an item.
        names: Of the two tensors.
        token: What stands for it in the prompt.
        merge: Patches that become one token.
        by_frame: Whether each frame of a video stands by itself in the prompt.
        more: Other tensors.
    """

    def medium(draw: Draw) -> tuple[Tensors, Groups]:
        total = sum(t * h * w for t, h, w in grids)
        tensors = {names[0]: draw(total, *patch), names[1]: torch.tensor(grids), **(more or {})}
        if by_frame:
            return tensors, [(token, h * w // merge) for t, h, w in grids for _ in range(t)]
        return tensors, [(token, t * h * w // merge) for t, h, w in grids]

    return medium


def frames(
    patch: tuple[int, ...],
    *,
    merge: int = 4,
    by_frame: bool = False,
    more: Tensors | None = None,
) -> Medium:
    """Patches of a video."""
    return patches(
        patch, ONE_VIDEO, names=VIDEOS, token=VIDEO, merge=merge, by_frame=by_frame, more=more
    )


def pixels(
    *shape: int,
    tokens: Sequence[int] = (),
    name: str = "pixel_values",
    token: int = IMAGE,
    more: Tensors | None = None,
) -> Medium:
    """One tensor of pixels, or of anything else.

    Args:
        shape: Of the whole tensor.
        tokens: One number an item.
        name: Of the tensor.
        token: What stands for it in the prompt.
        more: Other tensors.
    """

    def medium(draw: Draw) -> tuple[Tensors, Groups]:
        return {name: draw(*shape), **(more or {})}, [(token, count) for count in tokens]

    return medium


def video(*shape: int, tokens: Sequence[int], more: Tensors | None = None) -> Medium:
    """One tensor of frames."""
    return pixels(*shape, tokens=tokens, name="pixel_values_videos", token=VIDEO, more=more)


def sound(*shape: int, tokens: Sequence[int] = (), more: Tensors | None = None) -> Medium:
    """One tensor of mel frames."""
    return pixels(*shape, tokens=tokens, name="input_features", token=AUDIO, more=more)


def valid(length: int, *counts: int) -> torch.Tensor:
    """A mask (rows, length) that keeps the first `counts` places of each row."""
    return (torch.arange(length) < torch.tensor(counts)[:, None]).long()


def places(length: int, *sizes: tuple[int, int]) -> torch.Tensor:
    """Where patches are, (rows, length, 2) as (x, y), for images of (h, w) patches; else -1."""
    rows = torch.full((len(sizes), length, 2), -1)
    for row, (h, w) in zip(rows, sizes, strict=True):
        row[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    return rows


def prompt(groups: Groups) -> torch.Tensor:
    """Ids (1, N) of some words with the tokens of each group among them."""
    ids = [BOS]
    for token, count in groups:
        ids += [START, *[token] * count, END]
    return torch.tensor([[*ids, *WORDS]])
