"""Calls that a graph of a packed tower is compared with eager mode on before it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mmgraph.encoders.calls import CallSignature
from mmgraph.encoders.metadata import Grid
from mmgraph.encoders.random_inputs import normal
from mmgraph.errors import CaptureError
from mmgraph.types import GraphKey, ProbeCall

if TYPE_CHECKING:
    from mmgraph.encoders.packed import PackedEncoder

__all__ = ["PackedProbes", "square_grid"]

_GRID = "grid_thw"
_LEAST_GROUPS = 16
"""Merge groups of the smallest image of a probe that has several."""


class PackedProbes:
    """Makes the probes of one encoder."""

    def __init__(self, encoder: PackedEncoder) -> None:
        self._encoder = encoder

    def of(self, key: GraphKey) -> Sequence[ProbeCall]:
        """Two calls: the largest images that the graph takes, and smaller ones if it takes any."""
        largest = max(key.max_seqlen)
        if key.uniform:
            grids = self._uniform_grids(key)
            return [self._probe_call(key, grids, first) for first in (0, len(grids))]
        grids = self._probe_grids(key, largest)
        others = self._powers_of_two(key) if 2 * largest > key.token_budget else []
        if others in ([], grids):
            others = self._probe_grids(key, largest // 2)
        size = largest
        while len(grids) == len(others) == 1 and min(size, key.segment_capacity[0]) > 1:
            size //= 2  # somewhere there have to be images to keep apart
            several = self._probe_grids(key, size)
            others = several if len(several) > 1 else others
        return [self._probe_call(key, grids), self._probe_call(key, others)]

    def _probe_call(self, key: GraphKey, grids: Sequence[Grid], first: int = 0) -> ProbeCall:
        """A call with images of `grids`; those of one grid differ, from number `first` on."""
        assert isinstance(key.signature, CallSignature)
        ((name, shape, dtype),) = key.signature.tensors
        seen: Counter[Grid] = Counter()
        images: list[tuple[Grid, int]] = []
        for grid in grids:
            images.append((grid, first + seen[grid]))
            seen[grid] += 1
        patches = [
            self._patches((t * h * w, *shape), hash((t, h, w, nth))).to(dtype)
            for (t, h, w), nth in images
        ]
        arguments = {
            name: torch.cat(patches),
            _GRID: torch.tensor(grids),
            **self._encoder.constants(key),
        }
        return ProbeCall(arguments, [(key.signature, *image) for image in images])

    def _powers_of_two(self, key: GraphKey) -> list[Grid]:
        """Images of different powers of two that fill a graph of `key` together, the last largest.

        Graphs of other budgets have the same ones, so that eager mode has answered them already.
        """
        merge, grids = self._encoder.metadata.merge_size, list[Grid]()
        tokens, segments = key.token_budget, list(key.segment_capacity)
        for power in reversed(range((key.token_budget - 1).bit_length())):
            if 1 << power < _LEAST_GROUPS * merge * merge:
                break
            item = self._encoder.item(square_grid(1 << power, merge))
            left = [a - b for a, b in zip(segments, item.num_segments, strict=True)]
            fits = all(a <= b for a, b in zip(item.max_seqlen, key.max_seqlen, strict=True))
            if fits and item.num_tokens <= tokens and min(left) >= 0:
                grids.insert(0, item.geometry)
                tokens, segments = tokens - item.num_tokens, left
        return grids

    def _probe_grids(self, key: GraphKey, size: int) -> list[Grid]:
        """Equal images of at most `size` tokens that a graph of `key` takes, as many as fit."""
        merge = self._encoder.metadata.merge_size
        while True:
            item = self._encoder.item(square_grid(size, merge))
            count = min(
                key.token_budget // item.num_tokens,
                *(c // n for c, n in zip(key.segment_capacity, item.num_segments, strict=True)),
            )
            longest = zip(item.max_seqlen, key.max_seqlen, strict=True)
            if (count and all(a <= b for a, b in longest)) or size <= merge * merge:
                return [item.geometry] * max(1, count)
            size //= 2

    def _uniform_grids(self, key: GraphKey) -> list[Grid]:
        """Equal images that fill a graph whose segments of full attention are of one length."""
        merge, size = self._encoder.metadata.merge_size, key.max_seqlen[0]
        count = key.token_budget // size

        def fits(same: bool, segments: int, longest: int, capacity: int, bound: int) -> bool:
            if same:
                return (count * segments, longest) == (capacity, bound)
            return count * segments <= capacity and longest <= bound

        for height in range(merge, size // merge + 1, merge):
            if size % (height * merge):
                continue
            item = self._encoder.item((1, height, size // height))
            kinds = (key.uniform, item.num_segments, item.max_seqlen)
            if all(map(fits, *kinds, key.segment_capacity, key.max_seqlen)):
                return [item.geometry] * count
        raise CaptureError(f"no images of {size} tokens each fill a graph of {key}")

    def _patches(self, shape: Sequence[int], seed: int) -> torch.Tensor:
        return normal(shape, self._encoder.device, self._encoder.dtype, seed % 2**31)


def square_grid(tokens: int, merge: int) -> Grid:
    """The most square image grid of at most `tokens` patches."""
    groups = max(1, tokens // (merge * merge))
    height = max(1, int(groups**0.5))
    return (1, height * merge, (groups // height) * merge)
