"""Budgets: inferred from the encoder, or checked against it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mmgraph import ConfigError, EncoderCudaGraphManager, GraphConfig, UnsupportedModelError
from mmgraph.policy import ladder, squared
from tests.manager.engine import CPU, make_encoder, make_manager, tiny_encoder


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, (1, 2, 4, 8, 16, 32)),  # the default
        ({"row_budgets": (1, 3)}, (1, 3)),  # named
        ({"token_budgets": (16, 40, 100)}, (1, 2, 6)),  # tokens, rounded down to whole rows
        ({"token_budgets": (15, 16, 17, 31)}, (1,)),  # too small and equal ones fall out
        ({"token_budgets": (16,), "row_budgets": (2,)}, (2,)),  # rows are the more exact word
    ],
)
def test_budgets_of_rows_are_whole_rows(config: dict[str, Any], rows: tuple[int, ...]) -> None:
    config = {"token_budgets": None, **config}
    manager = make_manager(tiny_encoder("vit:tiny", "meta"), **config)
    assert manager.budgets == tuple(16 * n for n in rows)


def test_budgets_that_hold_no_row_are_an_error() -> None:
    message = (
        "no token budget holds one row of ViTModel, which has 16 tokens: raise token_budgets, or "
        "set row_budgets"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make_manager(tiny_encoder("vit:tiny", "meta"), token_budgets=(8, 15))


def test_budgets_of_a_packed_encoder_are_inferred_from_its_sizes() -> None:
    encoder = make_encoder(min_tokens=6, max_tokens=1000)
    manager = make_manager(encoder, token_budgets=None, row_budgets=(1, 2))
    assert manager.budgets == squared(ladder(6, 1000, 16, 2), 2)
    assert manager.budgets[-1] == 1000


def test_budgets_that_split_a_merge_group_are_an_error() -> None:
    message = (
        "token budgets of Qwen2VisionTransformerPretrainedModel must be multiples of 4 (its "
        "spatial merge), got 66: use 68"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_manager(tiny_encoder("qwen2_vl:tiny", "meta"), token_budgets=(64, 66, 70))


def test_a_model_without_the_protocol_is_an_error() -> None:
    message = (
        "Linear doesn't implement SupportsEncoderCudaGraph: implement its methods, or use "
        "mmgraph.attach() for a model of transformers or timm"
    )
    with pytest.raises(UnsupportedModelError, match=f"^{re.escape(message)}$"):
        make_manager(torch.nn.Linear(2, 2))


def test_graphs_of_cuda_can_not_serve_an_encoder_on_the_cpu() -> None:
    config = GraphConfig(backend="cuda")
    with pytest.raises(ConfigError, match="needs an encoder on a CUDA device, got one on cpu"):
        EncoderCudaGraphManager(config, CPU, torch.float32, make_encoder())


def test_a_manager_serves_the_modalities_of_its_encoder() -> None:
    manager = make_manager()
    assert [manager.supports_modality(m) for m in ("image", "video", "audio")] == [
        True,
        True,
        False,
    ]
