"""The packed layout: patches of all items end to end, attention within segments."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmgraph.encoders.calls import CallSignature, wants_attentions
from mmgraph.encoders.discovery import Tower
from mmgraph.encoders.metadata import Grid, PackedMetadata
from mmgraph.encoders.packed_probes import PackedProbes, square_grid
from mmgraph.encoders.random_inputs import normal
from mmgraph.encoders.rows import runs
from mmgraph.encoders.tower import TowerEncoder
from mmgraph.errors import InvalidInputError, UnsupportedModelError
from mmgraph.modules.attention import attention_implementation
from mmgraph.modules.watch import TowerWatch
from mmgraph.ops import VARLEN_ATTENTION, attending
from mmgraph.preparation import Preparation
from mmgraph.types import (
    BufferSpec,
    EncoderBatch,
    EncoderFacts,
    EncoderItemSpec,
    GraphKey,
    Reason,
    Refusal,
)

__all__ = ["PackedEncoder", "read_grids_on_host"]

_GRID = "grid_thw"
_METADATA = "metadata"
_CACHED_METADATA = 64
_CACHED_SIGNATURES = 64
_DEFAULT_MAX_TOKENS = 16384


class PackedEncoder(TowerEncoder):
    """A tower called as ``tower(patches (T, ...), grid_thw (B, 3), ...)``."""

    def __init__(
        self,
        tower: Tower,
        method: str = "forward",
        preparation: Preparation | None = None,
        watch: TowerWatch | None = None,
    ) -> None:
        super().__init__(tower, method, preparation, watch)
        self.metadata = PackedMetadata(tower.module)
        self._uploaded: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()
        self._signatures: dict[Hashable, Hashable] = {}
        """By what a call is besides its sizes."""
        self._lock = threading.Lock()

    def embed_multimodal(self, **mm_kwargs: Any) -> Any:
        """Call the tower in eager mode; unlike graphs it wants the grids on its own device."""
        grid, main = mm_kwargs.get(_GRID), mm_kwargs.get(self.signature.main_input)
        if isinstance(grid, torch.Tensor) and isinstance(main, torch.Tensor):
            mm_kwargs[_GRID] = grid.to(main.device, non_blocking=True)
        return self.forward(**mm_kwargs)

    def encoder_facts(self) -> EncoderFacts:
        merge = self.metadata.merge_size
        return EncoderFacts(
            name=self.name,
            modalities=self.tower.modalities,
            layout="packed",
            token_granularity=merge * merge,
            min_tokens=64 * merge * merge,
            max_tokens=_DEFAULT_MAX_TOKENS,
            eager_returns="tree",
            uniform_graphs=self.preparation.attention is not None,
            probes=PackedProbes(self).of,
            examples=self._examples,
        )

    def example_call(self) -> dict[str, Any]:
        shape = _patch_shape(self.tower.module)
        if shape is None:
            raise UnsupportedModelError(
                f"{self.name} has no convolution or linear layer that takes its patches: call it "
                "once with real inputs (capture='lazy'), then capture() knows them"
            )
        side = 4 * self.metadata.merge_size
        patches = normal((side * side, *shape), self.device, self.dtype)
        return {self.signature.main_input: patches, _GRID: torch.tensor([[1, side, side]])}

    def divided(self, batch: EncoderBatch, max_tokens: int) -> EncoderBatch | None:
        """Videos of more than `max_tokens` as shorter ones, where frames are independent."""
        items: list[EncoderItemSpec] = []
        for item in batch.items:
            if item.num_tokens <= max_tokens:
                items.append(item)
                continue
            parts = self.metadata.parts(item.geometry, max_tokens)
            if parts is None:
                return None
            first, *rest = map(self.item, parts)
            items += [first, *(replace(part, is_rest=True) for part in rest)]
        return EncoderBatch(tuple(items), batch.signature)

    def select_items(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        main, grids = mm_kwargs[self.signature.main_input], read_grids_on_host(mm_kwargs[_GRID])
        offsets = _offsets(grids)
        pieces = [main[offsets[i] : offsets[i + 1]] for i in items]
        return {
            **mm_kwargs,
            self.signature.main_input: torch.cat(pieces),
            _GRID: torch.tensor([grids[i] for i in items], dtype=torch.int64),
        }

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        assert isinstance(key.signature, CallSignature)
        ((name, shape, dtype),) = key.signature.tensors
        example = torch.from_numpy(self.metadata.example(key))
        self.metadata.prepare(key.token_budget)
        return {
            name: BufferSpec((key.token_budget, *shape), dtype),
            _METADATA: BufferSpec(tuple(example.shape), torch.uint8, example),
        }

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        main = mm_kwargs[self.signature.main_input]
        if len(items) == len(batch.items):
            pieces = [main]
        else:
            offsets = _offsets([item.geometry for item in batch.items])
            pieces = [main[offsets[a] : offsets[b]] for a, b in runs(items)]
        return {
            self.signature.main_input: pieces,
            _METADATA: [self._uploaded_metadata(batch, tuple(items), key)],
        }

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> Any:
        main = self.signature.main_input
        call = {
            main: buffers[main],
            **self.metadata.kwargs(buffers[_METADATA], key),
            **self.constants(key),
        }
        bounds = zip(key.segment_capacity, key.max_seqlen, key.uniform, strict=False)
        uniform = frozenset((count, longest) for count, longest, same in bounds if same)
        with (
            self.preparation.turns.alone(),
            attention_implementation(self.tower.module, VARLEN_ATTENTION),
            attending(uniform, self.preparation.attention),
        ):
            return self.preparation.run(lambda: self.forward(**call))

    def _read_items(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        main, grid = mm_kwargs.get(self.signature.main_input), mm_kwargs.get(_GRID)
        if not isinstance(main, torch.Tensor) or main.dim() < 2 or grid is None:
            raise Refusal(Reason.UNSUPPORTED_CALL, detail="no patches or no grid_thw")
        grids = read_grids_on_host(grid)
        batch = EncoderBatch(tuple(self.item(tuple(g)) for g in grids))
        expected = sum(item.num_tokens for item in batch.items)
        if expected != main.shape[0]:
            if main.shape[:2] == (1, expected):  # a tower that packs along dimension 1
                raise Refusal(Reason.UNSUPPORTED_CALL, batch, "patches along dimension 1")
            raise InvalidInputError(
                f"{_GRID}={grids} stands for {expected} patches, but {self.signature.main_input} "
                f"has {main.shape[0]} rows: pass both as the processor made them"
            )
        tensors = [n for n, v in mm_kwargs.items() if isinstance(v, torch.Tensor) and n != _GRID]
        if tensors != [self.signature.main_input]:
            raise Refusal(Reason.UNSUPPORTED_CALL, batch, f"tensors besides the patches: {tensors}")
        try:
            signature = self._call_signature(mm_kwargs, tensors, frozenset({_GRID}))
        except Refusal as refusal:
            raise Refusal(refusal.reason, batch, str(refusal)) from None
        if wants_attentions(signature):
            raise Refusal(Reason.UNSUPPORTED_CALL, batch, "packed attention gives no weights")
        return EncoderBatch(batch.items, signature)

    def _fingerprint(self, mm_kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The grids by value, the number of patches, and everything else as in other towers."""
        name = self.signature.main_input
        grid, main = mm_kwargs.get(_GRID), mm_kwargs.get(name)
        if grid is None or not isinstance(main, torch.Tensor) or main.dim() < 2:
            return ((), 0, super()._fingerprint(mm_kwargs))
        others = {n: value for n, value in mm_kwargs.items() if n != _GRID and n != name}
        kind = (main.shape[1:], main.dtype, super()._fingerprint(others))
        return (tuple(map(tuple, read_grids_on_host(grid))), main.shape[0], kind)

    def _read_new(self, fingerprint: Any, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        """Where nothing but the sizes is new, all is known by the fingerprint."""
        grids, rows, kind = fingerprint
        signature = self._signatures.get(kind)
        if signature is not None:
            items = tuple([item for item in map(self.metadata.item, grids) if item is not None])
            if len(items) == len(grids) and rows == sum([item.num_tokens for item in items]):
                return EncoderBatch(items, signature)
        batch = self._read_items(mm_kwargs)
        if len(self._signatures) >= _CACHED_SIGNATURES:
            self._signatures.clear()
        self._signatures[kind] = batch.signature
        return batch

    def item(self, grid: Grid) -> EncoderItemSpec:
        """What is known of an image or video by its grid.

        Raises:
            InvalidInputError: It is no grid.
        """
        spec = self.metadata.item(grid)
        if spec is None:
            raise InvalidInputError(
                f"{_GRID} holds {grid}, but a grid is (t, h, w) in patches, each at least 1, with "
                f"h and w multiples of {self.metadata.merge_size}"
            )
        return spec

    def _uploaded_metadata(
        self, batch: EncoderBatch, items: tuple[int, ...], key: GraphKey
    ) -> torch.Tensor:
        """Metadata of some items on the tower's device, remembered for next time."""
        with self._lock:
            known = self._uploaded.get((batch, items, key))
            if known is None:
                grids = tuple(batch.items[i].geometry for i in items)
                known = self._uploaded[batch, items, key] = self._upload(grids, key)
                if len(self._uploaded) > _CACHED_METADATA:
                    self._uploaded.popitem(last=False)
            else:
                self._uploaded.move_to_end((batch, items, key))
            return known

    def _upload(self, grids: tuple[Grid, ...], key: GraphKey) -> torch.Tensor:
        device = self.device
        host = torch.empty(
            self.metadata.num_bytes(key), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self.metadata.fill(host.numpy(), grids, key)
        return host.to(device, non_blocking=True)

    def _examples(self, budget: int, max_items: int) -> Sequence[EncoderBatch]:
        """One square image, and one of over half the budget among as many small ones as fit."""
        signature, merge = self.example_signature(), self.metadata.merge_size
        examples = [EncoderBatch((self.item(square_grid(budget, merge)),), signature)]
        large = self.item(square_grid(budget * 5 // 8, merge))
        others = min(max_items - 1, (budget - large.num_tokens) // (merge * merge))
        if others > 0:
            small = self.item(square_grid((budget - large.num_tokens) // others, merge))
            examples.append(EncoderBatch((large, *(small,) * others), signature))
        return examples


def read_grids_on_host(grid: Any) -> list[list[int]]:
    """Return a grid tensor (B, 3) as ints: free on the CPU, the one sync of a call on a GPU.

    Raises:
        InvalidInputError: It holds no integers, or has another shape.
    """
    if isinstance(grid, torch.Tensor):
        dtype = grid.dtype
        whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if grid.dim() > 2 or (grid.numel() and not whole):
            raise InvalidInputError(
                f"{_GRID} must hold integers, (B, 3) of them, got {tuple(grid.shape)} of {dtype}"
            )
        grids: list[list[int]] = (grid if grid.dim() == 2 else grid.unsqueeze(0)).tolist()
        return grids
    return [[int(n) for n in row] for row in grid]


def _offsets(grids: Sequence[Sequence[int]]) -> list[int]:
    offsets = [0]
    for t, h, w in grids:
        offsets.append(offsets[-1] + t * h * w)
    return offsets


def _patch_shape(module: nn.Module) -> tuple[int, ...] | None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv3d):
            return (layer.weight[0].numel(),)
        if isinstance(layer, nn.Conv2d):
            return tuple(layer.weight.shape[1:])
        if isinstance(layer, nn.Linear):
            return (layer.in_features,)
    return None
