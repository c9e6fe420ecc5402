"""Encoders that the tests of a module share; those that change one make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mmgraph.encoders import TowerEncoder
from tests.encoders.cases import LAYOUTS, make_encoder


@pytest.fixture(scope="module")
def encoders() -> dict[str, TowerEncoder]:
    """Of each layout one that no test changes."""
    return {layout: make_encoder(layout) for layout in LAYOUTS}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(layout: str, encoders: dict[str, TowerEncoder]) -> TowerEncoder:
    return encoders[layout]


@pytest.fixture
def rows(encoders: dict[str, TowerEncoder]) -> TowerEncoder:
    return encoders["rows"]


@pytest.fixture
def packed(encoders: dict[str, TowerEncoder]) -> TowerEncoder:
    return encoders["packed"]


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
