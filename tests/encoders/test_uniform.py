"""Graphs for segments of one length: keys of their own, equal to eager, and only for such calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmgraph import EncoderCudaGraphManager, GraphConfig
from mmgraph.encoders import encoder_for, find_towers
from mmgraph.preparation import Preparation
from mmgraph.types import GraphKey
from tests.contract.cases import PACKED_FAMILIES, Case, Size

CONFIG = GraphConfig(token_budgets=(64, 128, 256), exact_after=2)
SQUARE, WIDE, SMALL = (1, 8, 8), (1, 4, 16), (1, 4, 4)


@pytest.fixture(scope="module", params=PACKED_FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(str(request.param), "cpu")


@pytest.fixture
def manager(case: Case) -> EncoderCudaGraphManager:
    (tower,) = find_towers(case.tower)
    encoder: Any = encoder_for(
        tower, preparation=Preparation(case.tower, "", choose_attention=True)
    )
    return EncoderCudaGraphManager(CONFIG, case.device, case.dtype, encoder)


def serve(manager: EncoderCudaGraphManager, case: Case, sizes: Sequence[Size]) -> GraphKey | None:
    """One call, which must be right; return the key of the graph that served it alone."""
    before = {graph.key: graph.replays for graph in manager.stats().graphs}
    call = case.call(sizes)
    with torch.no_grad():
        output = manager.run(call)
        case.assert_equal_to_eager(output, case.eager(call), call)
    used = [g.key for g in manager.stats().graphs if g.replays > before.get(g.key, 0)]
    assert manager.stats().misses == {}
    return used[0] if len(used) == 1 else None


@pytest.mark.parametrize(
    ("sizes", "segments", "longest"),
    [([SQUARE], 1, 64), ([SQUARE] * 2, 2, 64), ([WIDE, SQUARE], 2, 64), ([SMALL] * 4, 4, 16)],
)
def test_they_serve_what_fills_a_budget(
    manager: EncoderCudaGraphManager,
    case: Case,
    sizes: list[Size],
    segments: int,
    longest: int,
) -> None:
    for _ in range(2):
        key = serve(manager, case, sizes)
        assert key is not None
        assert key.uniform[0]
        assert (key.segment_capacity[0], key.max_seqlen[0]) == (segments, longest)


def test_other_calls_of_the_same_total_get_another_graph(
    manager: EncoderCudaGraphManager, case: Case
) -> None:
    uniform = serve(manager, case, [SQUARE])
    assert uniform is not None
    for sizes in ([SMALL] * 3, [SMALL, (1, 4, 12)], [(1, 6, 6)]):
        key = serve(manager, case, sizes)
        assert key is not None
        assert key.token_budget == uniform.token_budget
        assert key.uniform == ()
    assert serve(manager, case, [SQUARE]) in {uniform, key}


@pytest.mark.parametrize("size", [(1, 6, 10), (1, 10, 14), (1, 2, 22), (1, 22, 2), (1, 2, 6)])
def test_sizes_with_few_divisors_are_served(
    manager: EncoderCudaGraphManager, case: Case, size: Size
) -> None:
    """Images of as many patches in another shape may not exist: 15 is no height.

    Thin ones have windows that are smaller than their bound.
    """
    for _ in range(4):
        key = serve(manager, case, [size])
    assert key is not None
    assert key.token_budget == size[1] * size[2]
    assert key.uniform[0]


def test_a_size_that_keeps_coming_gets_one(manager: EncoderCudaGraphManager, case: Case) -> None:
    odd = (1, 6, 12)  # 72 tokens, in a budget of 128
    first = serve(manager, case, [odd])
    second = serve(manager, case, [odd])
    assert first is not None
    assert second is not None
    assert (first.token_budget, first.uniform) == (128, ())
    assert (second.token_budget, second.uniform[0]) == (72, True)
    assert serve(manager, case, [odd]) == second


def test_up_front_graphs_are_for_any_call(case: Case) -> None:
    (tower,) = find_towers(case.tower)
    encoder: Any = encoder_for(
        tower, preparation=Preparation(case.tower, "", choose_attention=True)
    )
    config = GraphConfig(token_budgets=(64, 128), capture="upfront")
    manager = EncoderCudaGraphManager(config, case.device, case.dtype, encoder)
    manager.capture()
    assert not any(graph.key.uniform for graph in manager.stats().graphs)
    assert serve(manager, case, [SQUARE]) is not None
    assert serve(manager, case, [SMALL] * 3) is not None


def test_an_image_that_keeps_coming_in_new_company_gets_one(
    manager: EncoderCudaGraphManager, case: Case
) -> None:
    odd = (1, 6, 12)
    for other in ((1, 10, 20), (1, 10, 22)):  # too much for one replay together
        serve(manager, case, [odd, other])
    serve(manager, case, [(1, 10, 24), odd])
    replays = {g.key.token_budget: (g.replays, g.key.uniform) for g in manager.stats().graphs}
    count, uniform = replays[72]
    assert uniform[0]
    assert count == 2  # from the second time on
