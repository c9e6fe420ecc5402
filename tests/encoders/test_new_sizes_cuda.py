"""New sizes, one call after another without a wait: each is served with its own metadata."""

from __future__ import annotations

import random

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig
from tests.contract.cases import PACKED_FAMILIES, Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_new_sizes_on_the_heels_of_each_other_are_served_right(family: str) -> None:
    case = Case(family, "cuda")
    sides = range(4, 25, 4)
    grids = [(1, height, width) for height in sides for width in sides]
    random.Random(family).shuffle(grids)
    calls = [case.call([grid]) for grid in grids]
    config = GraphConfig(capture="upfront", token_budgets=[64, 256, 576])
    with torch.no_grad(), mmgraph.attach(case.tower, config) as handle:
        torch.cuda.synchronize()
        # Twice: the second time with what is remembered of the first.
        outputs = [case.tower(**call) for call in (*calls, *calls)]
        for output, call in zip(outputs, (*calls, *calls), strict=True):
            case.assert_equal_to_eager(output, case.eager(call), call)
        stats = handle.stats()
    assert stats.hits == stats.items == 2 * len(grids)
