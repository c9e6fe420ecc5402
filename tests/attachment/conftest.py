"""float32 means float32: results of graphs and of eager mode are compared closely."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """cuDNN runs float32 convolutions in TF32; graphs run those of patches as exact products."""
    convolutions = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    yield
    convolutions.fp32_precision = before
