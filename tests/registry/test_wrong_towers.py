"""A capture that succeeds and replays wrong is found by the probes of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, ViTConfig
from transformers.utils.import_utils import is_tracing

from mmgraph import GraphConfig, Reason, attach
from mmgraph.encoders import RowsEncoder, eager_towers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(mode="full", row_budgets=(2,), max_items=1)


class Tower(PreTrainedModel):
    """Right in eager mode; while it is recorded it takes something for granted."""

    config_class = ViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(48, 8)
        self.post_init()


def is_recorded(x: torch.Tensor) -> bool:
    """Whether the call is traced or captured, asked of torch itself."""
    return bool(is_tracing(x)) or (x.is_cuda and torch.cuda.is_current_stream_capturing())


class Stale(Tower):
    """Divides by what it measured when it last ran in eager mode."""

    scale: torch.Tensor

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if not is_recorded(pixel_values):
            self.scale = pixel_values.abs().amax()
        return self.layer(pixel_values.flatten(1)) / self.scale


class Branching(Tower):
    """Treats dark images in another way, and takes none for dark while it is recorded."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.layer(pixel_values.flatten(1))
        is_dark = not is_recorded(pixel_values) and bool(pixel_values[0, 0, 0, 0] < 0)
        return x.relu() if is_dark else x


def contents(sign: int, device: str) -> torch.Tensor:
    """Two images that no other call has, light or dark."""
    return sign * (torch.rand(2, 3, 4, 4, device=device) + 0.1)


def built(kind: type[Tower], device: str) -> Tower:
    torch.manual_seed(0)
    return kind(ViTConfig(image_size=4, patch_size=2)).eval().to(device)


def calls(tower: Any, device: str, signs: Sequence[int] = (1, -1, 1, -1)) -> list[bool]:
    """For each of a few calls, whether it gives what eager mode does."""
    equal = []
    for sign in signs:
        pixels = contents(sign, device)
        output = tower(pixels)
        with eager_towers():
            equal.append(torch.allclose(output, tower(pixels), rtol=1e-4, atol=1e-5))
    return equal


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Stale, Branching])
@torch.no_grad()
def test_a_graph_that_would_replay_wrong_never_serves(
    kind: type[Tower], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    tower = built(kind, device)
    with attach(tower, CONFIG) as handle:
        assert all(calls(tower, device))
        stats = handle.stats()
    assert stats.hits == 0
    assert stats.misses == {Reason.CAPTURE_FAILED: 8}
    if device == "cpu":  # on CUDA what reads on the host is refused before it is captured
        assert "differs from eager mode" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Stale, Branching])
@torch.no_grad()
def test_no_graph_of_an_exact_call_takes_the_wrong_way(
    kind: type[Tower], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Light images come until there is a graph, then dark ones."""
    monkeypatch.setattr("mmgraph.graphs.cuda.CudaBackend.is_timed", False)
    tower = built(kind, device)
    with attach(tower, GraphConfig(mode="piecewise")):
        assert all(calls(tower, device, signs=(1, 1, 1, -1, -1)))


@pytest.mark.parametrize("kind", [Stale, Branching])
@torch.no_grad()
def test_without_probes_it_would(kind: type[Tower], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowsEncoder, "_probes", lambda self, key: ())
    tower = built(kind, "cpu")
    with attach(tower, CONFIG) as handle:
        assert not all(calls(tower, "cpu"))
        assert handle.stats().hits == 8
