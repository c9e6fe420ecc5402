"""float32 means float32, on a GPU too: ids and features of two ways are compared closely."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def the_compiler_is_for_quick_cases(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes ten seconds a model, and the others are there for their towers."""
    if request.node.get_closest_marker("slow"):
        monkeypatch.setattr("mmgraph.preparation.preparation.find_blocks", lambda module: [])


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """No TF32: neither in convolutions, where it is the default, nor in products."""
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    yield
    for setting, precision in zip(settings, before, strict=True):
        setting.fp32_precision = precision
