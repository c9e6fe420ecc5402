"""A known call is replayed first and compared with what was captured while the replay runs."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel, ViTConfig

import mmgraph
from mmgraph import GraphConfig
from mmgraph.encoders import TowerWatch, eager_towers
from mmgraph.graphs import CapturedGraph
from mmgraph.manager.changes import Changes
from mmgraph.preparation import Turns
from mmgraph.recipes import load_recipe
from tests.attachment.test_changes import answer, assert_right, linear, pixels, set_data

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(row_budgets=(2,), compile_blocks=False)
EAGER = GraphConfig(row_budgets=(2,), compile_blocks=False, on_change="eager")


@pytest.fixture(params=DEVICES)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    return load_recipe("siglip:tiny").build_encoder(device=request.param, dtype=torch.float32)


def storages(tower: nn.Module) -> list[StorageWeakRef]:
    return [StorageWeakRef(parameter.untyped_storage()) for parameter in tower.parameters()]


def gone(references: list[StorageWeakRef]) -> list[bool]:
    gc.collect()
    return [reference.expired() for reference in references]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens at a call: replays, and looks at the tower."""
    happened: list[str] = []

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any) -> Any:
            happened.append(what)
            return method(self, *args)

        return noted

    for kind in CapturedGraph.__subclasses__():
        monkeypatch.setattr(kind, "replay", noting("replay", kind.replay))
    for name in ("differs", "noticed"):
        monkeypatch.setattr(Changes, name, noting("look", getattr(Changes, name)))
    return happened


@torch.no_grad()
def test_the_tower_is_looked_at_while_the_replay_runs(tower: nn.Module, order: list[str]) -> None:
    with mmgraph.attach(tower, CONFIG):
        x = pixels(tower)
        for _ in range(3):
            answer(tower, x)
        order.clear()
        answer(tower, x)
        assert order == ["replay", "look"]
        set_data(tower)
        order.clear()
        answer(tower, x)
        assert order[:3] == ["replay", "look", "look"]
        order.clear()
        tower.to(torch.float64).to(torch.float32)
        answer(tower, x)
        assert order[0] == "look", "its memory has been let go"


@torch.no_grad()
def test_a_replay_that_is_thrown_away_is_not_counted(tower: nn.Module, order: list[str]) -> None:
    with mmgraph.attach(tower, EAGER) as handle:
        for _ in range(3):
            answer(tower, pixels(tower))
        before = handle.stats()
        set_data(tower)
        order.clear()
        assert_right(tower, handle, replayed=False)
        after = handle.stats()
        assert "replay" in order
        assert (after.calls, after.hits, after.replays) == (before.calls + 1, 6, 3)
        assert after.tokens == before.tokens
        assert sum(after.call_sizes.values()) == after.calls


@torch.no_grad()
def test_memory_is_let_go_before_the_tower_moves(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG):
        for _ in range(2):
            answer(tower, pixels(tower))
        before = storages(tower)
        tower.to(torch.float64)
        assert all(gone(before))


@torch.no_grad()
def test_memory_of_replaced_weights_is_let_go_when_that_is_noticed(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG):
        for _ in range(2):
            answer(tower, pixels(tower))
        before = [StorageWeakRef(linear(tower).weight.untyped_storage())]
        set_data(tower)
        assert not any(gone(before)), "a replay may still read it"
        answer(tower, pixels(tower))
        assert all(gone(before))


@torch.no_grad()
def test_a_parameter_that_is_registered_lets_memory_go_at_once(tower: nn.Module) -> None:
    watch = TowerWatch(tower)
    assert watch.holds_memory
    linear(tower).weight = nn.Parameter(torch.randn_like(linear(tower).weight))
    assert not watch.holds_memory
    assert watch.version is not None
    assert watch.holds_memory
    watch.forget()
    assert not watch.holds_memory


@torch.no_grad()
def test_memory_taken_from_under_a_tensor_is_not_read(tower: nn.Module) -> None:
    """As FSDP does between its calls."""
    watch = TowerWatch(tower)
    for parameter in tower.parameters():
        parameter.untyped_storage().resize_(0)
    assert not watch.holds_memory
    watch.forget()


@torch.no_grad()
def test_no_replay_comes_first_while_another_thread_alters_the_tower(tower: nn.Module) -> None:
    turns = Turns()
    watch = TowerWatch(tower, turns)
    with turns.alone():
        assert watch.holds_memory
        turns._alone = -1  # a thread that isn't this one
        assert not watch.holds_memory
    assert watch.holds_memory
    watch.forget()


@torch.no_grad()
def test_copies_and_detached_towers_have_torch_s_own_methods(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG):
        assert_is_plain = [copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))]
        for twin in assert_is_plain:
            assert twin._apply.__func__ is type(twin)._apply
            assert twin._apply.__self__ is twin
            twin.to(torch.float64)
            assert next(twin.parameters()).dtype == torch.float64
        assert next(tower.parameters()).dtype == torch.float32
    assert "_apply" not in tower.__dict__


class Reading(nn.Module):
    """Reads its input on the host, so that a graph breaks here and runs it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.amax()) < 1e9
        return self.inner(x)


class Broken(PreTrainedModel):
    config_class = ViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.first = nn.Linear(48, 8)
        self.reading = Reading()
        self.last = nn.Linear(8, 8)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.last(self.reading(self.first(pixel_values.flatten(1))).relu())


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_break_that_fails_on_what_came_since_is_no_error(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmgraph.graphs.cuda.CudaBackend.is_timed", False)
    broken = Broken(ViTConfig(image_size=4, patch_size=2)).eval().to(device)
    with mmgraph.attach(broken, GraphConfig(mode="piecewise")) as handle:

        def equal() -> bool:
            x = torch.randn(2, 3, 4, 4, device=device)
            with eager_towers():
                expected = broken(x)
            return torch.allclose(broken(x), expected, rtol=1e-3, atol=1e-4)

        assert all(equal() for _ in range(3))
        assert handle.stats().hits > 0
        for layer, shape in ((broken.first, (16, 48)), (broken.reading.inner, (8, 16))):
            layer._parameters["weight"] = nn.Parameter(torch.randn(shape, device=device))
        broken.first._parameters["bias"] = nn.Parameter(torch.randn(16, device=device))
        assert all(equal() for _ in range(3))
