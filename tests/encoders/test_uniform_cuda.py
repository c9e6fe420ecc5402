"""Images that keep coming in new company have graphs of their own, and each answer is right."""

from __future__ import annotations

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig
from tests.contract.cases import PACKED_FAMILIES, Case

pytestmark = pytest.mark.gpu

OFTEN = (1, 24, 40)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
@pytest.mark.parametrize("exact_after", [1, 3])
def test_an_image_that_keeps_coming_in_new_company_gets_a_graph(
    family: str, exact_after: int
) -> None:
    case = Case(family, "cuda")
    others = [(1, 4 * n, 12) for n in range(1, 9)]
    config = GraphConfig(exact_after=exact_after)
    with torch.no_grad(), mmgraph.attach(case.tower, config) as handle:
        for nth, other in enumerate(others):
            call = case.call([other, OFTEN] if nth % 2 else [OFTEN, other, OFTEN])
            case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)
        stats = handle.stats()
        stores = [manager._store for manager in handle._managers()]
        tried = {key for store in stores for key in (*store.entries, *store.failed)}
    assert stats.hits + sum(stats.misses.values()) == stats.items == 20
    assert any(key.uniform and key.token_budget == 24 * 40 for key in tried)
