"""A small encoder as the author of an engine writes it, for tests of manager, runner and state.

Patches of all items lie end to end; items attend within themselves, then pairs of patches are
merged. Nothing of it is shared with ``mmgraph.encoders``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmgraph import (
    BufferSpec,
    EncoderBatch,
    EncoderCudaGraphManager,
    EncoderFacts,
    EncoderItemSpec,
    GraphConfig,
    GraphKey,
    Reason,
    Refusal,
)
from mmgraph.encoders import TowerEncoder, encoder_for, find_towers
from mmgraph.graphs.backend import CapturedGraph, Runnable
from mmgraph.graphs.trace import TraceBackend
from mmgraph.ops import varlen_attention_reference
from mmgraph.recipes import load_recipe

PATCH, WIDTH, HEADS, MERGE = 6, 8, 2, 2
BUDGETS = (8, 16, 32)
CPU = torch.device("cpu")


class EngineEncoder(nn.Module):
    """Implements ``SupportsEncoderCudaGraph`` for ``patches`` (T, PATCH) and ``lengths`` (B,).

    Attributes:
        eager_calls: Lengths of the items of each call in eager mode.
        fails_above: Budget above which it can't be captured.
        fails_at: Budget for which it can't be captured.
    """

    def __init__(self, max_tokens: int = 64, min_tokens: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(MERGE * WIDTH, WIDTH)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.eager_calls: list[list[int]] = []
        self.fails_above: int | None = None
        self.fails_at: int | None = None

    def encoder_facts(self) -> EncoderFacts:
        return EncoderFacts(
            name="engine",
            modalities=("image", "video"),
            layout="packed",
            token_granularity=MERGE,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            eager_returns="items",
            examples=self._examples,
        )

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> EncoderBatch:
        patches = mm_kwargs["patches"]
        batch = EncoderBatch(
            tuple(EncoderItemSpec(n, (1,), (n,)) for n in lengths_of(mm_kwargs)),
            (patches.shape[1:], patches.dtype, mm_kwargs.get("scale", 1.0)),
        )
        if not batch.items:
            raise Refusal(Reason.NO_ITEMS, batch)
        return batch

    def select_items(self, mm_kwargs: Mapping[str, Any], items: Sequence[int]) -> dict[str, Any]:
        pieces = mm_kwargs["patches"].split(lengths_of(mm_kwargs))
        return {
            **mm_kwargs,
            "patches": torch.cat([pieces[i] for i in items]),
            "lengths": mm_kwargs["lengths"][list(items)],
        }

    def capture_inputs(self, key: GraphKey) -> dict[str, BufferSpec]:
        shape, dtype, _ = key.signature
        segments = key.segment_capacity[0]
        ends = torch.zeros(segments + 1, dtype=torch.int32)
        ends[1:] = MERGE  # one small item
        return {
            "patches": BufferSpec((key.token_budget, *shape), dtype),
            "ends": BufferSpec((segments + 1,), torch.int32, ends),
        }

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        pieces = mm_kwargs["patches"].split([item.num_tokens for item in batch.items])
        ends = [0]
        for i in items:
            ends.append(ends[-1] + batch.items[i].num_tokens)
        ends += ends[-1:] * (key.segment_capacity[0] + 1 - len(ends))
        return {
            "patches": [pieces[i] for i in items],
            "ends": [torch.tensor(ends, dtype=torch.int32)],
        }

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        too_large = self.fails_above is not None and key.token_budget > self.fails_above
        if too_large or key.token_budget == self.fails_at:
            raise ValueError(f"no kernel for {key.token_budget} tokens")
        return self._encode(buffers["patches"], buffers["ends"], key.max_seqlen[0], key.signature)

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        lengths = lengths_of(mm_kwargs)
        self.eager_calls.append(lengths)
        signature = (None, None, mm_kwargs.get("scale", 1.0))
        outputs = []
        for patches in mm_kwargs["patches"].split(lengths):
            ends = torch.arange(2, dtype=torch.int32, device=patches.device) * len(patches)
            outputs.append(self._encode(patches, ends, len(patches), signature))
        return outputs

    def _encode(
        self, patches: torch.Tensor, ends: torch.Tensor, max_seqlen: int, signature: Any
    ) -> torch.Tensor:
        hidden = self.embed(patches) * signature[2]
        qkv = self.qkv(hidden).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        attended = varlen_attention_reference(*qkv, ends, max_seqlen).flatten(1)
        return self.merge((hidden + attended).view(-1, MERGE * WIDTH))

    def _examples(self, budget: int, max_items: int) -> list[EncoderBatch]:
        """One item, and a large one among as many small ones as may be."""
        signature = (torch.Size((PATCH,)), self.embed.weight.dtype, 1.0)
        others = min(max_items, budget // MERGE) - 1
        sizes = [budget], [budget - others * MERGE, *[MERGE] * others]
        return [
            EncoderBatch(tuple(EncoderItemSpec(n, (1,), (n,)) for n in items), signature)
            for items in sizes
        ]


def lengths_of(mm_kwargs: Mapping[str, Any]) -> list[int]:
    """Lengths as ints; a runner that batches items gives them a dimension of rows, (B, 1)."""
    lengths: list[int] = mm_kwargs["lengths"].flatten().tolist()
    return lengths


class MeasuredBackend(TraceBackend):
    """Says that each graph takes a kibibyte, and lists what was captured.

    Attributes:
        captured: Rows of the buffer of patches, for each attempt.
        graphs: What came of them.
        pools: Pools that were handed over.
        is_busy: Whether somebody else is capturing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[int] = []
        self.graphs: list[CapturedGraph] = []
        self.pools: list[Any] = []
        self.is_busy = False

    def capture(
        self, run: Runnable, buffers: Mapping[str, torch.Tensor], like: object = None
    ) -> CapturedGraph:
        self.captured.append(buffers["patches"].shape[0])
        graph = super().capture(run, buffers, like)
        graph.num_bytes = 1024
        self.graphs.append(graph)
        return graph

    def use_pool(self, pool: Any | None) -> None:
        self.pools.append(pool)

    def busy(self) -> bool:
        return self.is_busy


def make_encoder(**sizes: int) -> EngineEncoder:
    """An encoder whose weights are the same each time and large enough to be felt."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        encoder = EngineEncoder(**sizes)
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.5)
    return encoder.requires_grad_(False).eval()


def make_manager(
    encoder: Any = None, backend: MeasuredBackend | None = None, **config: Any
) -> EncoderCudaGraphManager:
    """A manager of an engine's encoder by default, with `BUDGETS`."""
    config = {"token_budgets": BUDGETS, **config}
    encoder = make_encoder() if encoder is None else encoder
    return EncoderCudaGraphManager(
        GraphConfig(**config), CPU, torch.float32, encoder, backend=backend
    )


def tiny_encoder(name: str, device: str = "cpu") -> TowerEncoder:
    """The encoder of a recipe."""
    (tower,) = find_towers(load_recipe(name).build_encoder(device=device))
    return encoder_for(tower)


def call_of(lengths: Sequence[int], seed: int = 1, **more: Any) -> dict[str, Any]:
    """A call with random patches."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(sum(lengths), PATCH, generator=generator)
    return {"patches": patches, "lengths": torch.tensor(lengths, dtype=torch.int64), **more}


def assert_items_equal(
    outputs: Sequence[torch.Tensor], encoder: EngineEncoder, call: dict[str, Any]
) -> None:
    """Compare with eager mode item by item, without leaving a trace in `eager_calls`."""
    expected = encoder.embed_multimodal(**call)
    encoder.eager_calls.pop()
    assert len(outputs) == len(expected)
    for output, item in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, item, rtol=1e-5, atol=1e-5)
