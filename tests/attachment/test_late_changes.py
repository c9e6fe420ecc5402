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
from mmgraph import GraphConfig, Reason
from mmgraph.encoders import eager_towers, encoder_for, find_towers
from mmgraph.graphs import CapturedGraph
from mmgraph.manager.changes import Changes
from mmgraph.modules import TowerWatch
from mmgraph.preparation import Turns, find_blocks
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
def test_a_size_that_never_came_is_replayed_first_where_its_graph_is_there(
    order: list[str],
) -> None:
    tower: Any = load_recipe("qwen2_5_vl:tiny").build_encoder()
    (found,) = find_towers(tower)
    width = encoder_for(found).example_call()["hidden_states"].shape[-1]

    def call(*grids: list[int]) -> torch.Tensor:
        rows = sum(h * w for _, h, w in grids)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        output: torch.Tensor = tower(x, grid_thw=torch.tensor(grids)).last_hidden_state
        return output

    config = GraphConfig(token_budgets=(64, 128), max_items=2, capture="upfront")
    with mmgraph.attach(tower, config) as handle:
        for grids in ([[1, 4, 6]], [[1, 8, 6]], [[1, 4, 4], [1, 4, 6]]):
            before = handle.stats().hits
            order.clear()
            output = call(*grids)
            assert order == ["replay", "look"]
            assert handle.stats().hits == before + len(grids)
            with eager_towers():
                torch.testing.assert_close(output, call(*grids), rtol=1e-4, atol=1e-5)
        set_data(tower)
        order.clear()
        output = call([1, 6, 6])
        assert order[:2] == ["replay", "look"]
        with eager_towers():
            torch.testing.assert_close(output, call([1, 6, 6]), rtol=1e-4, atol=1e-5)


def test_gradients_that_a_replaced_layer_wants_are_noticed_after_a_replay() -> None:
    tower = load_recipe("siglip:tiny").build_encoder().requires_grad_(False)
    with mmgraph.attach(tower, CONFIG) as handle:
        for _ in range(3):
            answer(tower, pixels(tower))
        layer = linear(tower)
        assert handle.stats().misses == {}
        for module in tower.modules():
            for name, child in module._modules.items():
                if child is layer:
                    module._modules[name] = copy.deepcopy(layer).requires_grad_(True)
        assert answer(tower, pixels(tower)).requires_grad
        assert list(handle.stats().misses) == [Reason.GRAD]


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
    held = watch.hold()
    assert held is not None
    assert held.is_there()
    linear(tower).weight = nn.Parameter(torch.randn_like(linear(tower).weight))
    assert not held.is_there()
    assert watch.hold() is None, "nobody has looked at it since"
    assert watch.version is not None
    again = watch.hold()
    assert again is not None
    assert again.is_there()
    watch.forget()
    assert not again.is_there()
    assert watch.hold() is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["siglip:tiny", "qwen3_vl:tiny", "qwen2_5_vl:tiny"])
def test_memory_taken_from_under_one_block_is_not_read(name: str) -> None:
    """As FSDP does between its calls."""
    for i in range(2):
        tower = load_recipe(name).build_encoder()
        watch = TowerWatch(tower)
        held = watch.hold()
        assert held is not None
        for parameter in find_blocks(tower)[i].parameters():
            parameter.untyped_storage().resize_(0)
        assert not held.is_there()
        watch.forget()


@torch.no_grad()
def test_no_replay_comes_first_while_another_thread_alters_the_tower(tower: nn.Module) -> None:
    turns = Turns()
    watch = TowerWatch(tower, turns)
    held = watch.hold()
    assert held is not None
    with turns.alone():
        assert held.is_there()
        turns._alone = -1  # a thread that isn't this one
        assert not held.is_there()
    assert held.is_there()
    watch.forget()


@torch.no_grad()
def test_each_method_holds_what_its_own_graphs_read(order: list[str]) -> None:
    """What one notices and lets go, graphs of the other still read."""
    tower: Any = load_recipe("timm:tiny").build_encoder()
    x = torch.randn(1, 3, *tower.patch_embed.img_size)
    with mmgraph.attach(tower, GraphConfig(row_budgets=(1,), compile_blocks=False)) as handle:
        for _ in range(3):
            tower(x), tower.forward_features(x)
        layer = tower.blocks[0].mlp.fc1
        reference = [StorageWeakRef(layer.weight.untyped_storage())]
        layer.weight.data = torch.randn_like(layer.weight) * layer.weight.std()
        tower(x)
        assert handle.stats().misses == {}
        assert not any(gone(reference)), "the graph of forward_features reads it"
        with eager_towers():
            expected = tower.forward_features(x)
        order.clear()
        torch.testing.assert_close(tower.forward_features(x), expected, rtol=1e-3, atol=1e-3)
        assert order[0] == "replay"
        assert all(gone(reference))


@torch.no_grad()
@pytest.mark.parametrize("end", ["shutdown", "detach", "clear"])
def test_memory_is_not_held_without_graphs(tower: nn.Module, end: str) -> None:
    # Not merged: a weight would lie in the memory of its neighbours then.
    config = GraphConfig(row_budgets=(2,), compile_blocks=False, merge_weights=False)
    handle = mmgraph.attach(tower, config)
    for _ in range(2):
        answer(tower, pixels(tower))
    getattr(handle, end)()
    handle.clear()
    before = [StorageWeakRef(linear(tower).weight.untyped_storage())]
    set_data(tower)
    assert all(gone(before))
    handle.shutdown()


@torch.no_grad()
@pytest.mark.parametrize("gate", [{"enforce_eager": True}, {"cudagraph_mm_encoder": False}])
def test_memory_is_not_held_behind_a_closed_gate(tower: nn.Module, gate: dict[str, bool]) -> None:
    with mmgraph.attach(tower, GraphConfig(**gate)):
        before = [StorageWeakRef(linear(tower).weight.untyped_storage())]
        set_data(tower)
        assert all(gone(before))


@torch.no_grad()
def test_copies_and_detached_towers_have_their_class_s_methods(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG):
        for twin in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
            twin.to(torch.float64)
            assert next(twin.parameters()).dtype == torch.float64
            with mmgraph.attach(twin, CONFIG):
                x = pixels(twin)
                answer(twin, x), answer(twin, x)
                before = storages(twin)
                twin.to(torch.float32)
                assert all(gone(before)), "an attached copy lets go like any other tower"
            assert "_apply" not in twin.__dict__
        assert next(tower.parameters()).dtype == torch.float32
    assert "_apply" not in tower.__dict__


@torch.no_grad()
def test_the_class_of_a_copy_may_be_set_to_another(tower: nn.Module) -> None:
    """As ``fully_shard`` does, whose class has an ``_apply`` of its own."""
    applied: list[nn.Module] = []

    class Sharded(type(tower)):  # type: ignore[misc]
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            applied.append(self)
            return super()._apply(fn, recurse)

    with mmgraph.attach(tower, CONFIG):
        twin = copy.deepcopy(tower)
    twin.__class__ = Sharded
    twin.to(torch.float64)
    assert applied == [twin]


@torch.no_grad()
def test_an_apply_of_the_user_s_own_is_called_and_comes_back(tower: nn.Module) -> None:
    seen: list[Any] = []

    def own(fn: Any, recurse: bool = True) -> nn.Module:
        seen.append(fn)
        return type(tower)._apply(tower, fn, recurse)

    tower.__dict__["_apply"] = own
    with mmgraph.attach(tower, CONFIG):
        tower.to(torch.float64)
        assert seen
    assert tower.__dict__["_apply"] is own


@torch.no_grad()
def test_the_grids_of_a_call_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each reading waits for the device; also where there is no graph yet."""
    tower: Any = load_recipe("qwen2_5_vl:tiny").build_encoder()
    (found,) = find_towers(tower)
    width = encoder_for(found).example_call()["hidden_states"].shape[-1]
    config = GraphConfig(token_budgets=(64,), max_items=1, capture="upfront", mode="full")
    with mmgraph.attach(tower, config):
        reads: list[Any] = []
        monkeypatch.setattr(
            "mmgraph.encoders.packed.read_grids_on_host",
            lambda grid: reads.append(grid) or grid.tolist(),
        )
        for grid in ([1, 4, 6], [1, 4, 6], [1, 20, 20], [1, 20, 20]):
            reads.clear()
            tower(torch.randn(grid[1] * grid[2], width), grid_thw=torch.tensor([grid]))
            assert len(reads) == 1, grid


@torch.no_grad()
def test_weights_that_shrink_under_a_graph_are_no_error(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        for _ in range(3):
            assert_right(tower, handle, replayed=True)
        mlp = next(m for m in tower.modules() if hasattr(m, "fc1"))
        keep = mlp.fc1.out_features // 2
        mlp.fc1.weight.data = mlp.fc1.weight.data[:keep].clone()
        mlp.fc1.bias.data = mlp.fc1.bias.data[:keep].clone()
        mlp.fc2.weight.data = mlp.fc2.weight.data[:, :keep].clone()
        for _ in range(3):
            assert_right(tower, handle, replayed=True)


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
