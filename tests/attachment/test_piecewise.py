"""Towers on graphs of exact calls: equal to eager from the first call on, replays from the second.

Packed towers have them in mode "piecewise", and in mode "auto" for what no budget holds. The towers
of `DECLARED` read sizes, positions or masks that no budget can stand for: they have no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig, Reason
from mmgraph.bench.inputs import ItemSize, on_host, tower_inputs
from mmgraph.encoders import eager_towers
from mmgraph.recipes import list_recipes, load_recipe
from tests.contract.cases import PACKED_FAMILIES, PACKED_SIZES, Case, error, tensors
from tests.registry.build import build
from tests.registry.entries.alone import ENTRIES as ALONE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CALLS = 3
DECLARED = [n for n in list_recipes() if n.endswith(":tiny") and load_recipe(n).inputs]
PIECEWISE = GraphConfig(mode="piecewise")
SMALL_BUDGETS = GraphConfig(token_budgets=(16, 32), max_items=1)
"""Budgets that hold the smallest images only."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=PACKED_FAMILIES)
def case(request: pytest.FixtureRequest, device: str) -> Case:
    return Case(str(request.param), device)


def limit_on(device: str) -> float:
    """How far two right answers may be apart: float32 on the CPU, bfloat16 on a GPU."""
    return 1e-5 if device == "cpu" else 0.05


@torch.no_grad()
def test_in_mode_piecewise_every_size_has_a_graph_from_the_second_call_on(case: Case) -> None:
    attributes = dict(case.tower.__dict__)
    with case.attach(PIECEWISE) as handle:
        for name, sizes in case.sizes.items():
            for i in range(CALLS):
                call, before = case.call(sizes), handle.stats()
                output = case.tower(**call)
                served = handle.stats().hits - before.hits
                assert served == (len(sizes) if i else 0), (name, i)
                case.assert_equal_to_eager(output, case.eager(call), call)
        stats = handle.stats()
        assert stats.misses == {Reason.PIECEWISE: sum(map(len, case.sizes.values()))}
        assert len(stats.graphs) == len(case.sizes)
        assert all(graph.replays == CALLS - 1 for graph in stats.graphs)
        assert "one exact call: 2 replays" in handle.report()
    assert case.tower.__dict__ == attributes


@torch.no_grad()
def test_in_mode_auto_what_is_above_the_budgets_has_one(case: Case) -> None:
    attributes = dict(case.tower.__dict__)
    with case.attach(SMALL_BUDGETS) as handle:
        for name in ("one", "smallest", "mixed", "above_among_others"):
            sizes = PACKED_SIZES[name]
            above = sum(t * h * w > 32 for t, h, w in sizes)
            for i in range(CALLS):
                call, before = case.call(sizes), handle.stats()
                output = case.tower(**call)
                case.assert_equal_to_eager(output, case.eager(call), call)
                served = handle.stats().hits - before.hits
                assert served == (len(sizes) if i else len(sizes) - above), (name, i)
        assert set(handle.stats().misses) == {Reason.ABOVE_BUDGET}
        keys = [graph.key for graph in handle.stats().graphs]
        assert any(key.exact is None for key in keys)
        assert any(key.exact is not None for key in keys)
    assert case.tower.__dict__ == attributes


@torch.no_grad()
def test_other_outputs_are_exact_graphs_of_their_own(case: Case) -> None:
    call = case.call(PACKED_SIZES["one"])
    with case.attach(PIECEWISE) as handle:
        for more in ({}, {"output_hidden_states": True}, {"return_dict": True}):
            before = handle.stats().hits
            for _ in range(CALLS):
                output, eager = case.tower(**call, **more), case.eager(call, **more)
                assert type(output) is type(eager)
                assert list(output.keys()) == list(eager.keys())
                for a, b in zip(tensors(output), tensors(eager), strict=True):
                    assert error(a, b) <= limit_on(case.device.type)
            assert handle.stats().hits - before >= CALLS - 1


@torch.no_grad()
def test_grids_on_the_device_do_as_well(case: Case) -> None:
    call = case.call(PACKED_SIZES["mixed"])
    moved = {**call, "grid_thw": call["grid_thw"].to(case.device)}
    with case.attach(PIECEWISE) as handle:
        for _ in range(CALLS):
            case.assert_equal_to_eager(case.tower(**moved), case.eager(call), call)
        assert handle.stats().hits == len(PACKED_SIZES["mixed"]) * (CALLS - 1)
        assert torch.equal(moved["grid_thw"].cpu(), call["grid_thw"])


@torch.no_grad()
def test_weights_changed_in_place_are_followed(case: Case) -> None:
    call = case.call(PACKED_SIZES["one"])
    layer = next(p for p in case.tower.parameters() if p.dim() > 1)
    before = layer.clone()
    with case.attach(PIECEWISE) as handle:
        first = [case.tower(**call) for _ in range(2)][-1]
        layer.mul_(1.5)
        try:
            output, eager = case.tower(**call), case.eager(call)
        finally:
            layer.copy_(before)
        assert handle.stats().hits == 2
    limit = limit_on(case.device.type)
    for a, b, old in zip(tensors(output), tensors(eager), tensors(first), strict=True):
        assert error(a, b) <= limit
        assert error(old, b) > limit


def sizes_for(name: str, config: Any) -> list[list[ItemSize]]:
    """Two calls of a tower: one item, then two of which one is of another size."""
    length = load_recipe(name).input_facts.get("length")
    if length is None:
        return [[(1, 4, 6)], [(1, 8, 4), (1, 4, 6)]]
    if hasattr(config, "patch_size"):
        return [[(1, 6, 6)], [(1, 3, 12), (1, 6, 6)]]
    return [[(length,)], [(length // 8,), (length,)]]


class Declared:
    """A tower whose recipe says what it takes."""

    def __init__(self, name: str, device: str) -> None:
        self.recipe = load_recipe(name)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.tower = self.recipe.build_encoder(device=device, dtype=self.dtype)
        self.device = device

    def call(self, items: Sequence[ItemSize]) -> dict[str, torch.Tensor]:
        """Fresh contents; sizes stay on the CPU, as processors leave them."""
        arguments = tower_inputs(
            self.recipe, self.tower.config, items, device=self.device, dtype=self.dtype
        )
        sizes = on_host(self.recipe)
        return {n: v if n in sizes else v.to(self.device) for n, v in arguments.items()}

    def eager(self, call: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        with eager_towers():
            return tensors(self.tower(**{n: v.to(self.device) for n, v in call.items()}))


@pytest.mark.parametrize("mode", ["auto", "piecewise"])
@pytest.mark.parametrize("name", DECLARED)
@torch.no_grad()
def test_a_tower_with_declared_inputs_replays_from_the_second_call_on(
    name: str, mode: Any, device: str
) -> None:
    declared = Declared(name, device)
    tower = declared.tower
    attributes = dict(tower.__dict__)
    with mmgraph.attach(tower, GraphConfig(mode=mode)) as handle:
        for items in sizes_for(name, tower.config):
            before = handle.stats()
            for i in range(CALLS):
                call = declared.call(items)
                output, eager = tensors(tower(**call)), declared.eager(call)
                assert [t.shape for t in output] == [t.shape for t in eager]
                assert max(map(error, output, eager)) <= limit_on(device)
                stats = handle.stats()
                assert stats.hits - before.hits == i * len(items)
                assert stats.items - before.items == (i + 1) * len(items)
        assert len(handle.stats().graphs) == 2
        assert ("blocks compiled" in handle.report()) == (device == "cuda")
    assert tower.__dict__ == attributes


def test_there_are_towers_with_declared_inputs() -> None:
    assert {"gemma4:tiny", "mistral3:tiny", "qwen3_asr:tiny", "video_llama_3:tiny"} <= set(DECLARED)


@torch.no_grad()
def test_a_tower_that_has_segments_in_other_calls_only(device: str) -> None:
    """RADIO's attention takes the lengths of several images, and none for images of one size."""
    (entry,) = (e for e in ALONE if e.model == "radio")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tower = build(entry, dtype).to(device)
    with mmgraph.attach(tower, PIECEWISE) as handle:
        for _ in range(CALLS):
            pixels = torch.randn(2, 3, 64, 64, device=device, dtype=dtype)
            output = tensors(tower(pixels))
            with eager_towers():
                eager = tensors(tower(pixels))
            assert max(map(error, output, eager)) <= limit_on(device)
        assert handle.stats().hits == 2 * (CALLS - 1)
