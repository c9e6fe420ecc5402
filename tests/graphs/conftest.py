"""A device and its own backend: `trace` on the CPU, `cuda` on a GPU."""

from __future__ import annotations

import pytest
import torch

from mmgraph.graphs import GraphBackend, select_backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(device: str) -> GraphBackend:
    return select_backend("auto", torch.device(device))
