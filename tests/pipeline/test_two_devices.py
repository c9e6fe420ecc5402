"""`generate` of a model whose tower and language model accelerate has put on two devices.

Both orders of a device map count: inputs go to the device that it names first, which is the
tower's, so that graphs serve, or the other one, so that they can't.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

import mmgraph
from mmgraph import GraphConfig, Reason
from mmgraph.encoders import find_towers
from tests.pipeline.architectures import Answer, Architecture, generate
from tests.pipeline.fixed import FIXED
from tests.pipeline.packed import PACKED

TWO_GPUS = (pytest.mark.gpu, pytest.mark.multi_gpu)
PLACES: list[Any] = [("cpu", "cpu"), pytest.param((0, 1), marks=TWO_GPUS)]
CONFIG = GraphConfig(compile_blocks=False)
KNOWN = {architecture.type: architecture for architecture in (*PACKED, *FIXED)}
TYPES = ["qwen2_5_vl", "llava"]


def device_map_of(
    model: nn.Module, tower: Any, others: Any, *, tower_first: bool
) -> dict[str, Any]:
    """The tower in one place and all that isn't in it in another."""
    (found, *_) = find_towers(model)

    def outside(module: nn.Module, prefix: str) -> list[str]:
        names: list[str] = []
        for name, child in module.named_children():
            if child is found.module:
                continue
            if any(part is found.module for part in child.modules()):
                names += outside(child, f"{prefix}{name}.")
            else:
                names.append(prefix + name)
        return names

    rest = dict.fromkeys(outside(model, ""), others)
    mine = {found.name: tower}
    return {**mine, **rest} if tower_first else {**rest, **mine}


def ask(model: Any, architecture: Architecture, device: str, seed: int) -> Answer:
    medium = next(iter(architecture.quick))
    return generate(model, architecture.inputs(medium, device, seed))


def outcome_of(model: Any, architecture: Architecture, device: str, seed: int) -> Answer | str:
    """The answer, or the kind of error: not every model of transformers runs on any device map."""
    try:
        return ask(model, architecture, device, seed)
    except RuntimeError as error:
        return type(error).__name__


def assert_same(ours: Answer | str, expected: Answer | str) -> None:
    if isinstance(ours, str) or isinstance(expected, str):
        assert ours == expected
        return
    assert torch.equal(ours.ids, expected.ids)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tower_first", [True, False], ids=["tower first", "tower last"])
@pytest.mark.parametrize("places", PLACES, ids=["cpu", "gpus"])
@pytest.mark.parametrize("kind", TYPES)
def test_words_are_the_same_where_a_device_map_parts_tower_and_words(
    kind: str, places: tuple[Any, Any], tower_first: bool
) -> None:
    first, second = places
    device = "cpu" if first == "cpu" else f"cuda:{first}"
    architecture = KNOWN[kind]
    model = architecture.build("cpu")
    device_map = device_map_of(model, second, first, tower_first=tower_first)
    skip = model._skip_keys_device_placement  # as transformers itself calls it
    model = dispatch_model(model, device_map, force_hooks=True, skip_keys=skip)
    tower = find_towers(model)[0].module
    assert {str(p.device) for p in tower.parameters()} == {
        "cpu" if second == "cpu" else f"cuda:{second}"
    }
    expected = [outcome_of(model, architecture, device, seed) for seed in (0, 1)]
    if first == second or not tower_first:  # what must run does, and hangs on the medium
        assert isinstance(expected[0], Answer)
        assert isinstance(expected[1], Answer)
        assert not torch.equal(expected[0].ids, expected[1].ids)
    with mmgraph.attach(model, CONFIG) as handle:
        for seed in (0, 1, 0):
            assert_same(outcome_of(model, architecture, device, seed), expected[seed])
        stats = handle.stats()
        if first == second or tower_first:
            assert stats.misses == {}
            assert stats.hits == stats.items > 0
        else:
            assert set(stats.misses) == {Reason.DEVICE}
            assert stats.hits == 0
