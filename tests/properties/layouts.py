"""Four ways to be called, each with random calls of which some are bad.

A layout makes calls, runs them with graphs and without, and counts their items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from mmgraph import EncoderRunner, EncoderStats, GraphConfig
from mmgraph.encoders import Tower
from mmgraph.preparation import Preparation, Turns
from tests.contract.cases import Case, tensors
from tests.manager.engine import PATCH, call_of, make_encoder, make_manager

Call = dict[str, Any]
CONFIGS: list[dict[str, Any]] = [
    {},
    {"max_graphs": 3, "exact_after": 3, "verify_every": 7},
    {"max_graphs": 4, "min_hits": 2, "exact_after": 0, "mode": "full"},
]


class Layout(ABC):
    """Calls of one kind."""

    @abstractmethod
    def call(self, random: Random) -> Call:
        """A call, mostly a good one."""

    @abstractmethod
    def ours(self, call: Call) -> Sequence[torch.Tensor]: ...

    @abstractmethod
    def eager(self, call: Call) -> Sequence[torch.Tensor]: ...

    @abstractmethod
    def stats(self) -> EncoderStats: ...

    @abstractmethod
    def num_items(self, call: Call) -> int: ...

    def contradicts_itself(self, call: Call) -> bool:
        """Whether its sizes stand for other contents, so that it may be an error of ours."""
        return False

    @abstractmethod
    def clear(self) -> None:
        """Free all graphs in the middle of it."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


def random_patches(random: Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return torch.randn(*shape, generator=generator)


class Engine(Layout):
    """The encoder of an engine's author, through its manager."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.encoder: Any = make_encoder()
        self.manager = make_manager(self.encoder, **config)

    def call(self, random: Random) -> Call:
        lengths = [2 * random.randint(1, 9) for _ in range(random.randint(1, 5))]
        if random.random() < 0.1:
            lengths[0] = 40  # above every budget
        call = call_of(lengths, random.randrange(1 << 30))
        fault = random.random()
        if fault < 0.02:
            call["lengths"] = torch.zeros(0, dtype=torch.int64)
        elif fault < 0.04:
            call["patches"] = call["patches"][:-1]
        elif fault < 0.06:
            call["patches"] = random_patches(random, sum(lengths), PATCH + 1)
        elif fault < 0.08:
            call["patches"] = call["patches"].double()
        elif fault < 0.10:
            call["patches"] = call["patches"].t().contiguous().t()
        elif fault < 0.12:
            call["patches"][: lengths[0]] = float("nan")
        return call

    def ours(self, call: Call) -> Sequence[torch.Tensor]:
        return self.manager.execute(call)

    def eager(self, call: Call) -> Sequence[torch.Tensor]:
        return self.encoder.embed_multimodal(**call)

    def stats(self) -> EncoderStats:
        return self.manager.stats()

    def num_items(self, call: Call) -> int:
        return len(call["lengths"])

    def contradicts_itself(self, call: Call) -> bool:
        return int(call["lengths"].sum()) != len(call["patches"])

    def clear(self) -> None:
        self.manager.clear()

    def close(self) -> None:
        self.manager.shutdown()


class Runner(Engine):
    """Items of two modalities in any order, through a runner."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.graphs = EncoderRunner(self.encoder, self.manager)
        self.plain = EncoderRunner(self.encoder)

    def call(self, random: Random) -> Call:
        items = []
        for _ in range(random.randint(0, 6)):
            length, modality = 2 * random.randint(1, 9), random.choice(["image", "video", "audio"])
            width = PATCH + (random.random() < 0.01)
            item = {
                "patches": random_patches(random, length, width),
                "lengths": torch.tensor([length]),
            }
            items.append((modality, item))
        return {"items": items}

    def ours(self, call: Call) -> Sequence[torch.Tensor]:
        return self.graphs.execute_mm_encoder(call["items"])

    def eager(self, call: Call) -> Sequence[torch.Tensor]:
        return self.plain.execute_mm_encoder(call["items"])

    def num_items(self, call: Call) -> int:
        return sum(modality != "audio" for modality, _ in call["items"])  # that one it isn't for

    def contradicts_itself(self, call: Call) -> bool:
        return False


class Attached(Layout):
    """A tiny tower of a family, attached."""

    def __init__(self, family: str, config: dict[str, Any]) -> None:
        self.case = Case(family, "cpu")
        budgets: dict[str, Any] = {"token_budgets": (64, 128, 256), "row_budgets": (1, 2, 4)}
        self.handle = self.case.attach(GraphConfig(**{**budgets, **config}))

    def ours(self, call: Call) -> Sequence[torch.Tensor]:
        return tensors(self.case.tower(**call))

    def eager(self, call: Call) -> Sequence[torch.Tensor]:
        with self.case.eagerly():
            return tensors(self.case.tower(**call))

    def stats(self) -> EncoderStats:
        return self.handle.stats()

    def clear(self) -> None:
        self.handle.clear()

    def close(self) -> None:
        self.handle.detach()


def as_on_a_gpu(tower: Tower, config: GraphConfig, turns: Turns) -> Preparation:
    """With graphs for segments of one length, as where there is a choice of kernels."""
    choose = config.choose_attention
    return Preparation(tower.module, tower.name, choose_attention=choose, turns=turns)


class Packed(Attached):
    def __init__(self, config: dict[str, Any]) -> None:
        with patch("mmgraph.attachment.handle._prepare", as_on_a_gpu):
            super().__init__("qwen2_5_vl", config)

    def call(self, random: Random) -> Call:
        most = random.choice([4, 4, 8])
        grids = [
            (random.choice([1, 1, 1, 2]), 2 * random.randint(1, most), 2 * random.randint(1, most))
            for _ in range(random.randint(1, 4))
        ]
        if random.random() < 0.03:
            grids[-1] = (1, 18, 16)  # above every budget
        call = self.case.call(grids)
        fault, grid = random.random(), call["grid_thw"]
        if fault < 0.02:
            call["hidden_states"] = call["hidden_states"][:-4]
        elif fault < 0.04:
            grid[0, random.randrange(3)] = random.choice([0, -1, 3])
        elif fault < 0.05:
            call["hidden_states"] = call["hidden_states"].double()
        elif fault < 0.06:
            call = self.case.call([])
        elif fault < 0.07:
            call["hidden_states"].requires_grad_()
        elif fault < 0.08:
            call["output_hidden_states"] = True
        elif fault < 0.09:
            call["unheard_of"] = 1
        return call

    def num_items(self, call: Call) -> int:
        return len(call["grid_thw"])

    def contradicts_itself(self, call: Call) -> bool:
        grid = call["grid_thw"]
        bad = bool((grid < 1).any() or (grid[:, 1:] % 2).any())
        return bad or int(grid.prod(1).sum()) != len(call["hidden_states"])


class Rows(Attached):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("clip", config)

    def call(self, random: Random) -> Call:
        call = self.case.call([()] * random.randint(1, 6))
        ((name, pixels),) = call.items()
        fault = random.random()
        if fault < 0.02:
            call[name] = pixels[:, :, :-1]
        elif fault < 0.04:
            call[name] = pixels[:0]
        elif fault < 0.06:
            call[name] = pixels.double()
        elif fault < 0.08:
            call[name] = pixels.transpose(2, 3)
        elif fault < 0.10:
            call["output_hidden_states"] = True
        elif fault < 0.11:
            call[name] = pixels.long()
        elif fault < 0.12:
            call["unheard_of"] = object()
        elif fault < 0.13:
            call = {}
        return call

    def num_items(self, call: Call) -> int:
        main = call.get("pixel_values")
        return 1 if main is None else len(main)


LAYOUTS: dict[str, type[Any]] = {
    "engine": Engine,
    "runner": Runner,
    "packed": Packed,
    "rows": Rows,
}
