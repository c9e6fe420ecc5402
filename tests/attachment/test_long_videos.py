"""Videos larger than every budget run in parts where frames don't see each other, as one item."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mmgraph import GraphConfig, Reason
from mmgraph.encoders.metadata import PackedMetadata
from tests.contract.cases import PACKED_FAMILIES, Case, Size, tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(token_budgets=(64, 128, 256), max_items=1, exact_after=0)
FAMILIES = [f for f in PACKED_FAMILIES if f != "glm4v"]
"""Those whose towers take a video; GLM-4V's gets each frame as an image."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, device: str) -> Case:
    return Case(str(request.param), device)


@pytest.mark.parametrize(
    ("sizes", "replays"),
    [
        ([(8, 8, 8)], 2),  # four frames fill the largest budget
        ([(5, 8, 8)], 2),
        ([(3, 12, 12)], 3),  # one frame at a time
        ([(1, 4, 4), (9, 6, 10), (1, 8, 8)], None),
    ],
)
@torch.no_grad()
def test_they_are_served_by_several_replays(
    case: Case, sizes: Sequence[Size], replays: int | None
) -> None:
    with case.attach(CONFIG) as handle:
        for _ in range(2):
            call = case.call(sizes)
            case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)
        stats = handle.stats()
    assert (stats.items, stats.hits, stats.misses) == (2 * len(sizes), 2 * len(sizes), {})
    if replays is not None:
        assert sum(graph.replays for graph in stats.graphs) == 2 * replays


@torch.no_grad()
def test_a_frame_above_every_budget_runs_in_eager_mode(case: Case) -> None:
    with case.attach(GraphConfig(token_budgets=(64,), max_items=1, mode="full")) as handle:
        call = case.call([(2, 12, 12)])
        case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)
        assert handle.stats().misses == {Reason.ABOVE_BUDGET: 1}


@torch.no_grad()
def test_what_can_only_be_served_in_part_runs_whole(case: Case) -> None:
    """A graph that isn't captured up front: the video is one item of eager mode, not five."""
    config = GraphConfig(
        token_budgets=(256,), max_items=1, mode="full", capture="upfront", max_graphs=1
    )
    with case.attach(config) as handle:
        call = case.call([(2, 18, 18)])
        case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)
        assert handle.stats().misses == {Reason.ABOVE_BUDGET: 1}


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_a_video_is_divided_into_what_adds_up_to_it(family: str) -> None:
    metadata = PackedMetadata(Case(family, "cpu").tower)
    assert metadata.parts((7, 8, 8), 200) == [(3, 8, 8), (3, 8, 8), (1, 8, 8)]
    assert metadata.parts((6, 8, 8), 200) == [(3, 8, 8), (3, 8, 8)]
    assert metadata.parts((6, 8, 8), 63) is None
    assert metadata.parts((1, 8, 8), 32) is None
    assert metadata.parts((2, 8, 8), 128) is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_frames_that_see_each_other_or_count_are_never_divided(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = Case(family, "cpu").tower
    for attribute in ("merge_temporal", "include_temporal"):
        with monkeypatch.context() as patched:
            patched.setattr(tower, attribute, True, raising=False)
            assert PackedMetadata(tower).parts((6, 8, 8), 200) is None


@torch.no_grad()
def test_outputs_of_parts_belong_to_the_caller(case: Case) -> None:
    with case.attach(CONFIG):
        kept = tensors(case.tower(**case.call([(8, 8, 8)])))
        copies = [tensor.clone() for tensor in kept]
        case.tower(**case.call([(8, 8, 8)]))
        assert all(map(torch.equal, kept, copies))


def test_where_nobody_here_knows_how_positions_are_read_eager_mode_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers may learn a mode of interpolation that we don't know yet."""
    case = Case("qwen3_vl", "cpu")
    monkeypatch.setattr("mmgraph.encoders.grids._OFFSETS", {})
    with torch.no_grad(), case.attach(GraphConfig(token_budgets=(64, 256))) as handle:
        for grids in ([(1, 8, 8)], [(8, 8, 8)], [(1, 8, 8), (8, 8, 8)]):
            call = case.call(grids)
            case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)
        stats = handle.stats()
    assert stats.items == sum(stats.misses.values()) == 4
