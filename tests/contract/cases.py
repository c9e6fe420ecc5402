"""The encoders of the contract list, and how each is called and judged.

On the CPU everything runs in float32 on the `trace` backend, on CUDA in bfloat16 on graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mmgraph import GraphConfig, Handle, attach
from mmgraph.encoders import eager_towers
from mmgraph.graphs import BufferArena
from mmgraph.recipes import Recipe, load_recipe

PACKED_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
VISION_FAMILIES = ("clip", "siglip", "dinov2", "dinov3", "vit", "llava", "internvl", "gemma3")
FAMILIES = (*PACKED_FAMILIES, *VISION_FAMILIES, "paligemma", "whisper", "timm")
CONFIG = GraphConfig(token_budgets=(64, 128, 256), row_budgets=(1, 2, 4))
Size = tuple[int, ...]
"""Of one item: (t, h, w) of a packed tower, () of a row."""

_SMALL, _MIDDLE, _WIDE = (1, 4, 4), (1, 8, 6), (1, 4, 20)
_VIDEO = (4, 4, 6)
_LARGEST, _TOO_LARGE = (1, 16, 16), (1, 18, 16)
PACKED_SIZES: dict[str, list[Size]] = {
    "one": [_MIDDLE],
    "several_of_one_size": [_MIDDLE] * 3,
    "mixed": [_WIDE, _SMALL, _MIDDLE],
    "same_total_otherwise": [_SMALL] * 11,
    "smallest": [(1, 2, 2)],
    "largest": [_LARGEST],
    "video": [_VIDEO],
    "video_among_images": [_SMALL, _VIDEO, _MIDDLE],
    "several_replays": [_LARGEST, _MIDDLE, (1, 16, 14), _SMALL],
    "above_every_budget": [_TOO_LARGE],
    "above_among_others": [_SMALL, _TOO_LARGE, _MIDDLE],
}
ROW_SIZES: dict[str, list[Size]] = {
    "one": [()],
    "several_of_one_size": [()] * 2,
    "padded": [()] * 3,
    "largest": [()] * 4,
    "several_replays": [()] * 9,
}
SIZES = {"packed": PACKED_SIZES, "rows": ROW_SIZES}
OVERSIZED = {"above_every_budget": 1, "above_among_others": 0}
"""Items that no graph serves: the second time such a size comes, it gets a graph of its own."""


@dataclass(frozen=True)
class Judgement:
    """How one tensor of an output compares; relative errors in the Frobenius norm."""

    against_eager: float
    of_graph: float
    of_eager: float
    numel: int

    @classmethod
    def of(cls, ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> Judgement:
        return cls(error(ours, eager), error(ours, truth), error(eager, truth), ours.numel())


class Case:
    """A tiny tower on one device with a float32 twin."""

    def __init__(self, family: str, device: str) -> None:
        self.recipe: Recipe = load_recipe(f"{family}:tiny")
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.tower: nn.Module = self.recipe.build_encoder(device=device, dtype=self.dtype)
        self.reference: nn.Module = copy.deepcopy(self.tower).float()
        self.layout = self.recipe.layout
        self._generator = torch.Generator().manual_seed(0)

    @property
    def sizes(self) -> dict[str, list[Size]]:
        if self.recipe.name == "glm4v:tiny":  # the model hands frames over as images
            return {n: sizes for n, sizes in PACKED_SIZES.items() if _VIDEO not in sizes}
        return SIZES[self.layout]

    def attach(self, config: GraphConfig = CONFIG) -> Handle:
        return attach(self.tower, config)

    def call(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """Arguments of a call with fresh random contents."""
        if self.layout == "rows":
            return {self._main_input: self._random(len(sizes), *self._row_shape)}
        vision = self.tower.config
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        total = sum(t * h * w for t, h, w in sizes)
        return {
            "hidden_states": self._random(total, patch),
            "grid_thw": torch.tensor(list(sizes), dtype=torch.int64).reshape(-1, 3),
        }

    def eager(self, call: Mapping[str, Any], **more: Any) -> Any:
        """What the tower returns without graphs; it wants its grids on its own device."""
        with self.eagerly():
            return self.tower(**self._on_device(call), **more)

    def _on_device(self, call: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.to(self.device) for name, value in call.items()}

    @staticmethod
    def eagerly() -> AbstractContextManager[None]:
        return eager_towers()

    @staticmethod
    def arenas(handle: Handle) -> list[BufferArena]:
        managers = [m.manager for m in handle._methods if m.manager is not None]
        return [arena for manager in managers for arena in manager._store.arenas.values()]

    def poison_pool(self, handle: Handle) -> None:
        """Fill with NaN what graphs take their intermediate results from.

        On CUDA that is the free memory of the shared pool: a graph captured there that writes NaN
        to all it can get. A recording allocates as it runs.
        """
        if self.device.type == "cuda":
            nan = torch.full((1,), float("nan"), device="cuda")
            (backend,) = handle._backends.values()
            graph = backend.capture(_fill_with, {"value": nan})
            graph.replay()
            torch.cuda.synchronize()
            graph.close()

    def judge(self, output: Any, eager: Any, call: Mapping[str, Any]) -> list[Judgement]:
        """Compare an output with eager, and both with the float32 twin; one judgement a tensor."""
        with torch.no_grad():
            widened = {name: _widened(value) for name, value in self._on_device(call).items()}
            truth = self.reference(**widened)
        ours, theirs, true = (tensors(o) for o in (output, eager, truth))
        assert [t.shape for t in ours] == [t.shape for t in theirs]
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        return [Judgement.of(*triple) for triple in zip(ours, theirs, true, strict=True)]

    def assert_equal_to_eager(self, output: Any, eager: Any, call: Mapping[str, Any]) -> None:
        """The bound of docs/design.md for one call.

        In half precision two right answers differ by their rounding, and the ratio of two such
        errors over few numbers is itself random: hence the terms that shrink with their count. The
        second is for single rows, whose numbers don't err independently.
        """
        for verdict in self.judge(output, eager, call):
            if self.device.type == "cpu":
                assert verdict.against_eager <= 1e-5, verdict
            else:
                slack = 1.10 + 4 / verdict.numel**0.5 + 16 / verdict.numel
                assert verdict.of_graph <= slack * verdict.of_eager, verdict

    def assert_as_exact_as_eager(self, verdicts: Sequence[Sequence[Judgement]]) -> None:
        """The bound itself, over many calls together."""
        for of_one_tensor in zip(*verdicts, strict=True):
            ours = sum(v.of_graph**2 for v in of_one_tensor) ** 0.5
            theirs = sum(v.of_eager**2 for v in of_one_tensor) ** 0.5
            assert ours <= 1.10 * theirs + 1e-5, (ours, theirs)

    @property
    def _main_input(self) -> str:
        if self.recipe.library == "timm":
            return "x"
        return "input_features" if self.recipe.modalities == ("audio",) else "pixel_values"

    @property
    def _row_shape(self) -> tuple[int, ...]:
        if self.recipe.library == "timm":
            return (3, *self.tower.patch_embed.img_size)
        config = self.tower.config
        if self._main_input == "input_features":
            return (config.num_mel_bins, 2 * config.max_source_positions)
        size = config.image_size
        return (3, size, size) if isinstance(size, int) else (3, *size)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)


def tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def _fill_with(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    value = buffers["value"]
    blocks = [value.expand(1 << k).contiguous() for k in range(8, 20) for _ in range(8)]
    return [torch.stack([block.sum() for block in blocks])]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value
