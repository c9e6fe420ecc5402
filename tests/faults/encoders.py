"""Encoders with the faults of shared/lessons.md put in by hand, one each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmgraph import EncoderBatch, EncoderCudaGraphManager, EncoderFacts, GraphConfig, GraphKey
from tests.manager.engine import MERGE, EngineEncoder, call_of, lengths_of, make_encoder


class Probed(EngineEncoder):
    """Says which calls a fresh graph must answer, as towers of transformers do."""

    def encoder_facts(self) -> EncoderFacts:
        return dataclasses.replace(super().encoder_facts(), probes=self._probes)

    def _probes(self, key: GraphKey) -> Sequence[Mapping[str, Any]]:
        longest = min(key.token_budget, key.max_seqlen[0])
        others = min(key.segment_capacity[0] - 1, (key.token_budget - longest) // MERGE)
        calls = call_of([longest, *[MERGE] * others]), call_of([MERGE], seed=2)
        return [{**call, "patches": call["patches"].to(self.merge.weight.device)} for call in calls]


class StaleMetadata(EngineEncoder):
    """Segments stay those of the first call."""

    _first: Any = None

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        inputs = super().replay_inputs(mm_kwargs, batch, items, key)
        self._first = self._first or inputs["ends"]
        return {**inputs, "ends": self._first}


class BakedMetadata(EngineEncoder):
    """Segments are constants of the capture."""

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        device = buffers["patches"].device
        ends = torch.zeros(key.segment_capacity[0] + 1, dtype=torch.int32, device=device)
        ends[1:] = MERGE
        return super().encoder_forward({**buffers, "ends": ends}, key)


class LeakingPadding(EngineEncoder):
    """Every row sees the sum of all, those included that belong to nobody."""

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        output = super().encoder_forward(buffers, key)
        return output + 0.1 * buffers["patches"].sum()


class MultipliedPadding(EngineEncoder):
    """Rows that belong to nobody are multiplied by zero: right unless they hold NaN."""

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        output, patches = super().encoder_forward(buffers, key), buffers["patches"]
        rows = torch.arange(patches.shape[0], device=patches.device)
        padding = (rows >= buffers["ends"][-1])[:, None]
        return output + (torch.where(padding, patches, 0 * patches) * 0).sum()


class WrongOrder(EngineEncoder):
    """Items are laid out the other way round."""

    def replay_inputs(
        self, mm_kwargs: Mapping[str, Any], batch: EncoderBatch, items: Sequence[int], key: GraphKey
    ) -> dict[str, Sequence[torch.Tensor]]:
        return super().replay_inputs(mm_kwargs, batch, items[::-1], key)


class ReadsOnHost(EngineEncoder):
    """Has a branch on what its inputs hold."""

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        output = super().encoder_forward(buffers, key)
        return -output if buffers["patches"].sum().item() > 1e9 else output


def probed(kind: type[EngineEncoder]) -> type[EngineEncoder]:
    """The same encoder with probes."""
    return type(f"Probed{kind.__name__}", (kind, Probed), {})


def manager_of(
    kind: type[EngineEncoder], device: str = "cpu", **config: Any
) -> EncoderCudaGraphManager:
    encoder = kind().requires_grad_(False).eval()
    encoder.load_state_dict(make_encoder().state_dict())
    settings = GraphConfig(**{"token_budgets": (8, 16, 32), **config})
    return EncoderCudaGraphManager(
        settings, torch.device(device), torch.float32, encoder.to(device)
    )


def call_on(device: str, lengths: Sequence[int], seed: int = 1) -> dict[str, Any]:
    call = call_of(lengths, seed)
    return {**call, "patches": call["patches"].to(device)}


def is_right(manager: EncoderCudaGraphManager, call: dict[str, Any]) -> bool:
    """Whether a call is answered as eager mode does."""
    ours, eager = manager.execute(call), manager.model.embed_multimodal(**call)
    assert len(ours) == len(lengths_of(call))
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(ours, eager, strict=True))
