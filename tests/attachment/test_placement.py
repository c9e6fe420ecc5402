"""Weights that are offloaded, quantised, or moved after the tower was attached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import mmgraph
from mmgraph import CaptureError, GraphConfig, Handle, Reason
from mmgraph.preparation import Preparation
from mmgraph.preparation.activation import FusedActivations
from mmgraph.recipes import load_recipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(row_budgets=(1, 2, 4), compile_blocks=False)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tower(device: str) -> nn.Module:
    return load_recipe("vit:tiny").build_encoder(device=device, dtype=torch.float32)


@pytest.fixture
def twin(tower: nn.Module) -> nn.Module:
    return copy.deepcopy(tower)


def assert_right(tower: nn.Module, twin: nn.Module, handle: Handle, *, replayed: bool) -> None:
    """What `tower` answers is what a tower without graphs does, and is counted as it should be."""
    side = twin.config.image_size
    for _ in range(2):
        x, before = (
            torch.randn(2, 3, side, side, device=next(twin.parameters()).device),
            handle.stats(),
        )
        ours, theirs = tower(x).last_hidden_state, twin(x).last_hidden_state
        assert ours.device == theirs.device
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        after = handle.stats()
        assert (after.hits - before.hits, after.items - before.items) == (2 * replayed, 2)
        assert after.hits + sum(after.misses.values()) == after.items


@torch.no_grad()
def test_a_tower_on_disk_runs_as_eager_does(
    tower: nn.Module, twin: nn.Module, tmp_path: Path, device: str, caplog: Any
) -> None:
    accelerate.disk_offload(tower, str(tmp_path), execution_device=torch.device(device))
    assert all(p.is_meta for p in tower.parameters())
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle, replayed=False)
        assert handle.stats().misses == {Reason.PLACEMENT: 4}
        assert all(p.is_meta for p in tower.parameters())
    assert "accelerate moves the weights of" in caplog.text


@torch.no_grad()
def test_a_tower_of_which_a_part_is_on_disk_runs_as_eager_does(
    tower: nn.Module, twin: nn.Module, tmp_path: Path, device: str
) -> None:
    names = [name for name, _ in tower.named_children()]
    device_map: dict[str, Any] = dict.fromkeys(names, 0 if device == "cuda" else "cpu")
    device_map[names[-1]] = "disk"
    tower = accelerate.dispatch_model(tower, device_map, offload_dir=str(tmp_path))
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle, replayed=False)
        assert handle.stats().misses == {Reason.PLACEMENT: 4}


@torch.no_grad()
def test_offload_that_comes_while_attached_is_noticed(
    tower: nn.Module, twin: nn.Module, device: str, caplog: Any
) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle, replayed=True)
        accelerate.cpu_offload(tower.layernorm, torch.device(device))
        assert_right(tower, twin, handle, replayed=False)
        assert handle.stats().misses == {Reason.PLACEMENT: 4}
        assert handle.stats().graphs == ()
        assert "accelerate moves the weights of 'layernorm' in at each forward" in caplog.text
        accelerate.hooks.remove_hook_from_submodules(tower)
        tower.to(device)
        assert_right(tower, twin, handle, replayed=True)


@torch.no_grad()
def test_a_tower_that_goes_and_comes_back_has_graphs_again(
    tower: nn.Module, twin: nn.Module, device: str, caplog: Any
) -> None:
    away = "meta" if device == "cpu" else "cpu"
    weights = copy.deepcopy(tower.state_dict())
    side = tower.config.image_size
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, twin, handle, replayed=True)
        tower.to(away)
        x = torch.randn(1, 3, side, side, device=away)
        assert tower(x).last_hidden_state.device.type == away
        assert handle.stats().misses == {Reason.PLACEMENT: 1}
        with pytest.raises(CaptureError):
            handle.capture()
        tower.to_empty(device=device)
        tower.load_state_dict(weights)
        assert_right(tower, twin, handle, replayed=True)
        assert handle.stats().misses == {Reason.PLACEMENT: 1}
    said = "parameters on the meta device" if device == "cpu" else "moved from cuda:0 to cpu"
    assert said in caplog.text


class Quantised(torch.Tensor):
    """Whole numbers with a scale, which looks like a weight: what torchao puts in its place."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = [a.codes * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


def quantise(tower: nn.Module) -> None:
    for layer in tower.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)


@torch.no_grad()
@pytest.mark.parametrize("first", [quantise, None], ids=["before", "while attached"])
def test_a_tower_in_8_bit_has_graphs(
    tower: nn.Module, twin: nn.Module, first: Callable[[nn.Module], None] | None
) -> None:
    if first is not None:
        first(tower)
    with mmgraph.attach(tower, CONFIG) as handle:
        if first is None:
            assert_right(tower, twin, handle, replayed=True)
            quantise(tower)
        quantise(twin)
        assert_right(tower, twin, handle, replayed=True)
        assert handle.stats().misses == {}
        layer = next(m for m in tower.modules() if isinstance(m, nn.Linear))
        other = next(m for m in twin.modules() if isinstance(m, nn.Linear))
        for linear in (layer, other):
            weight: Any = linear.weight
            linear.weight = nn.Parameter(Quantised(weight.codes, 2 * weight.scale), False)
        assert_right(tower, twin, handle, replayed=True)


def test_weights_in_8_bit_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU plain ones move when a tower is attached; torchao's can't be copied there."""

    def prepared(tower: nn.Module) -> str:
        preparation = Preparation(
            tower, "tower", align_weights=True, merge_weights=True, fuse_activations=True
        )
        lines = "\n".join(preparation.describe())
        preparation.undo()
        return lines

    monkeypatch.setattr("mmgraph.preparation.align._MIN_FEATURES", 8)
    tower = load_recipe("siglip:tiny").build_encoder()
    assert "linear layers merged" in prepared(tower)
    assert "linear layers with their activation" in prepared(tower)
    quantise(tower)
    weights = list(tower.parameters())
    assert "linear layers" not in prepared(tower)
    assert all(a is b for a, b in zip(tower.parameters(), weights, strict=True))


def test_layers_that_accelerate_has_wrapped_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forward is on the instance: an activation taken off would be put on by nobody."""
    monkeypatch.setattr("mmgraph.preparation.align._MIN_FEATURES", 8)
    tower = load_recipe("siglip:tiny").build_encoder()
    fused = FusedActivations(tower)
    assert len(fused) > 0
    x = torch.randn(1, 3, tower.config.image_size, tower.config.image_size)
    with torch.no_grad():
        expected = tower(x).last_hidden_state
        accelerate.dispatch_model(tower, {"": "cpu"}, force_hooks=True)
        with fused.applied():
            torch.testing.assert_close(tower(x).last_hidden_state, expected)
    assert len(FusedActivations(tower)) == 0
