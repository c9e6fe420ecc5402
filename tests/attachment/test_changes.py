"""What changes under a graph is noticed before the next replay; no answer is ever stale."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_modules

import mmgraph
from mmgraph import GraphConfig, Handle, Reason
from mmgraph.modules import TowerWatch
from mmgraph.preparation import Turns
from mmgraph.recipes import load_recipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = GraphConfig(row_budgets=(1, 2, 4), compile_blocks=False)
EAGER = GraphConfig(row_budgets=(1, 2, 4), compile_blocks=False, on_change="eager")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tower(device: str) -> nn.Module:
    return load_recipe("siglip:tiny").build_encoder(device=device, dtype=torch.float32)


def pixels(tower: nn.Module) -> torch.Tensor:
    parameter, side = next(tower.parameters()), tower.config.image_size
    return torch.randn(2, 3, side, side, device=parameter.device, dtype=parameter.dtype)


def answer(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = tower(x).last_hidden_state
    return output


def assert_right(tower: nn.Module, handle: Handle, *, replayed: bool) -> None:
    """The next answer is what eager mode gives now, from a graph or not."""
    x, hits = pixels(tower), handle.stats().hits
    ours = answer(tower, x)
    assert (handle.stats().hits > hits) is replayed
    with mmgraph.encoders.eager_towers():
        torch.testing.assert_close(ours, answer(tower, x), rtol=1e-3, atol=1e-3)


def block(tower: nn.Module) -> Any:
    return next(m for m in tower.modules() if isinstance(m, nn.ModuleList))[0]


def linear(tower: nn.Module) -> nn.Linear:
    return next(m for m in block(tower).modules() if isinstance(m, nn.Linear))


def redrawn(parameter: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(parameter) * parameter.std()


def set_data(tower: nn.Module) -> None:
    linear(tower).weight.data = redrawn(linear(tower).weight)


def set_parameter(tower: nn.Module) -> None:
    linear(tower).weight = nn.Parameter(redrawn(linear(tower).weight), requires_grad=False)


def set_submodule(tower: nn.Module) -> None:
    old = linear(tower)
    new = nn.Linear(old.in_features, old.out_features, device=old.weight.device)
    parent = next(m for m in tower.modules() if old in m.children())
    setattr(parent, next(n for n, m in parent.named_children() if m is old), new)


def set_block(tower: nn.Module) -> None:
    blocks = next(m for m in tower.modules() if isinstance(m, nn.ModuleList))
    blocks[0] = blocks[1]


def delete_block(tower: nn.Module) -> None:
    del next(m for m in tower.modules() if isinstance(m, nn.ModuleList))[0]


def tie(tower: nn.Module) -> None:
    blocks = next(m for m in tower.modules() if isinstance(m, nn.ModuleList))
    blocks[0].mlp.fc1.weight = blocks[1].mlp.fc1.weight


def set_table_of_parameters(tower: nn.Module) -> None:
    """As accelerate's ``set_module_tensor_to_device`` does."""
    new = nn.Parameter(redrawn(linear(tower).weight), requires_grad=False)
    linear(tower)._parameters["weight"] = new


def set_table_of_buffers(tower: nn.Module) -> None:
    """As ``module.to()`` does."""
    places = tower.embeddings.position_ids
    tower.embeddings._buffers["position_ids"] = places.flip(-1).contiguous()


def set_table_of_modules(tower: nn.Module) -> None:
    """As older ways of quantising do."""
    mlp, old = block(tower).mlp, block(tower).mlp.fc1
    mlp._modules["fc1"] = nn.Linear(old.in_features, old.out_features, device=old.weight.device)


def remove_bias(tower: nn.Module) -> None:
    linear(tower).bias = None


def add_bias(tower: nn.Module) -> None:
    old = linear(tower).bias  # kept, or the allocator may give its address to the new one
    remove_bias(tower)
    linear(tower)._parameters["bias"] = nn.Parameter(torch.randn_like(old))


def patch_forward(tower: nn.Module) -> None:
    """As libraries do that bring kernels of their own."""
    mlp = block(tower).mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 2


def set_attention(tower: nn.Module) -> None:
    name = "sdpa" if tower.config._attn_implementation == "eager" else "eager"
    tower.set_attn_implementation(name)


def cast(tower: nn.Module) -> None:
    tower.to(torch.bfloat16)
    tower.to(torch.float32)


def deterministic(tower: nn.Module) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


CHANGES = [set_data, set_parameter, set_submodule, set_block, delete_block, tie, cast]
CHANGES += [set_table_of_parameters, set_table_of_buffers, set_table_of_modules]
CHANGES += [remove_bias, add_bias, patch_forward, set_attention, deterministic]


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


# cuBLAS wants to be asked for that before it is used.
@pytest.mark.filterwarnings("ignore:Deterministic behavior")
@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_captured_anew(tower: nn.Module, change: Callable[[nn.Module], None]) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        change(tower)
        for _ in range(2):
            assert_right(tower, handle, replayed=True)
        assert handle.stats().misses == {}


# cuBLAS wants to be asked for that before it is used.
@pytest.mark.filterwarnings("ignore:Deterministic behavior")
@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_means_eager_mode_where_that_is_wanted(
    tower: nn.Module, change: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    with mmgraph.attach(tower, EAGER) as handle:
        assert_right(tower, handle, replayed=True)
        change(tower)
        for _ in range(2):
            assert_right(tower, handle, replayed=False)
        assert handle.stats().misses == {Reason.CHANGED: 4}
        assert handle.stats().graphs == ()
        handle.clear()
        assert_right(tower, handle, replayed=True)
    assert caplog.text.count("has changed since it was captured") == 1


@torch.no_grad()
@pytest.mark.parametrize("first", ["ordinary", "functional"])
def test_a_functional_call_uses_its_own_weights_and_leaves_none(
    tower: nn.Module, first: str
) -> None:
    others = {name: redrawn(p) for name, p in tower.named_parameters() if p.dim() > 1}
    with mmgraph.attach(tower, CONFIG) as handle:
        if first == "ordinary":
            assert_right(tower, handle, replayed=True)
        x = pixels(tower)
        ours = functional_call(tower, others, (x,)).last_hidden_state
        with mmgraph.encoders.eager_towers():
            theirs = functional_call(tower, others, (x,)).last_hidden_state
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        assert_right(tower, handle, replayed=True)


@torch.no_grad()
def test_attributes_that_a_module_sets_are_no_change(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        block(tower).mlp.last_seen = 3
        assert_right(tower, handle, replayed=True)
        assert handle.stats().graphs[0].replays == 2


@torch.no_grad()
def test_what_was_captured_up_front_is_eager_after_a_change(tower: nn.Module) -> None:
    config = GraphConfig(row_budgets=(1, 2), capture="upfront", compile_blocks=False)
    with mmgraph.attach(tower, config) as handle:
        assert_right(tower, handle, replayed=True)
        set_data(tower)
        assert_right(tower, handle, replayed=False)
        assert handle.stats().misses == {Reason.CHANGED: 2}
        handle.clear()
        handle.capture()
        assert_right(tower, handle, replayed=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda tower: linear(tower).weight.copy_(redrawn(linear(tower).weight)),
        lambda tower: linear(tower).weight.data.mul_(0.5),
        lambda tower: tower.load_state_dict({k: v * 0.5 for k, v in tower.state_dict().items()}),
    ],
    ids=["copy", "data_mul", "load_state_dict"],
)
def test_changes_in_place_are_followed_without_a_capture(
    tower: nn.Module, change: Callable[[nn.Module], None]
) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        graphs = [graph.key for graph in handle.stats().graphs]
        change(tower)
        assert_right(tower, handle, replayed=True)
        assert [graph.key for graph in handle.stats().graphs] == graphs
        assert handle.stats().graphs[0].replays == 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_a_submodule_fire(tower: nn.Module, kind: str) -> None:
    seen: list[nn.Module] = []
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        hook = getattr(block(tower), kind)(lambda module, *_: seen.append(module))
        answer(tower, pixels(tower))
        assert seen == [block(tower)]
        assert handle.stats().misses == {Reason.HOOKS: 2}
        hook.remove()
        assert_right(tower, handle, replayed=True)
        assert len(handle.stats().graphs) == 1
        assert handle.stats().graphs[0].replays == 2


@torch.no_grad()
def test_hooks_that_were_there_before_and_on_the_tower_itself(tower: nn.Module) -> None:
    inner: list[int] = []
    outer: list[int] = []
    hook = linear(tower).register_forward_hook(lambda *_: inner.append(1))
    tower.register_forward_hook(lambda *_: outer.append(1))
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=False)
        hook.remove()
        inner.clear(), outer.clear()
        answer(tower, pixels(tower))
        assert handle.stats().hits == 2
        assert outer == [1]


@torch.no_grad()
def test_hooks_of_transformers_that_collect_outputs_are_no_obstacle(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        x = pixels(tower)
        for _ in range(2):
            assert tower(x, output_hidden_states=True).hidden_states is not None
            answer(tower, x)
        assert handle.stats().misses == {}


@torch.no_grad()
def test_a_part_in_training_mode_that_drops_is_noticed(tower: nn.Module) -> None:
    parent = block(tower)
    parent.add_module("dropout", nn.Dropout(0.5).eval())
    forward = type(parent).forward

    def dropping(*args: Any, **kwargs: Any) -> Any:
        return parent.dropout(forward(parent, *args, **kwargs))

    parent.forward = dropping
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        parent.dropout.train()
        x = pixels(tower)
        assert not torch.equal(answer(tower, x), answer(tower, x))
        assert handle.stats().misses == {Reason.TRAINING: 4}
        parent.dropout.eval()
        assert_right(tower, handle, replayed=True)


class Adapter(nn.Module):
    """What PEFT's layers look like from outside: a base layer and switches that are attributes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.deltas = nn.ParameterDict(
            {n: nn.Parameter(torch.randn_like(base.weight) * 0.1) for n in ("a", "b")}
        )
        self._active_adapter: list[str] = ["a"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"a": 1.0, "b": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        if not self._disable_adapters:
            for name in self._active_adapter:
                out = out + self.scaling[name] * nn.functional.linear(x, self.deltas[name])
        return out


def _swap(adapter: Adapter) -> None:
    adapter._active_adapter = ["b"]


def _disable(adapter: Adapter) -> None:
    adapter._disable_adapters = True


def _scale(adapter: Adapter) -> None:
    adapter.scaling["a"] = 3.0


@torch.no_grad()
@pytest.mark.parametrize("switch", [_swap, _disable, _scale])
def test_adapters_that_come_and_are_switched_are_noticed(
    tower: nn.Module, switch: Callable[[Adapter], None]
) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        adapter = Adapter(block(tower).mlp.fc1)
        block(tower).mlp.fc1 = adapter
        assert_right(tower, handle, replayed=True)
        switch(adapter)
        assert_right(tower, handle, replayed=True)
        block(tower).mlp.fc1 = adapter.base
        assert_right(tower, handle, replayed=True)
        assert handle.stats().misses == {}


@torch.no_grad()
def test_a_tower_that_changes_at_each_of_its_calls_ends_in_eager_mode(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        for _ in range(8):
            set_data(tower)
            answer(tower, pixels(tower))
        assert handle.stats().misses == {Reason.CHANGED: 10}
        assert handle.stats().graphs == ()


@contextmanager
def _registration_hooks() -> Iterator[None]:
    tables = (
        torch_modules._global_parameter_registration_hooks,
        torch_modules._global_buffer_registration_hooks,
        torch_modules._global_module_registration_hooks,
    )
    gc.collect()
    before = [len(table) for table in tables]
    yield
    assert [len(table) for table in tables] == before


@torch.no_grad()
def test_nothing_watches_once_everything_is_detached(tower: nn.Module) -> None:
    with _registration_hooks():
        first = mmgraph.attach(tower, CONFIG)
        second = mmgraph.attach(load_recipe("clip:tiny").build_encoder(), CONFIG)
        nn.Linear(2, 2)  # of somebody else
        first.detach()
        second.detach()


@torch.no_grad()
def test_exact_graphs_are_out_of_date_as_well(device: str) -> None:
    recipe = load_recipe("qwen2_vl:tiny")
    tower = recipe.build_encoder(device=device, dtype=torch.float32)
    grid, config = torch.tensor([[1, 8, 8]]), GraphConfig(mode="piecewise")
    patches = torch.randn(64, tower.patch_embed.proj.weight[0].numel(), device=device)

    def call() -> torch.Tensor:
        output: torch.Tensor = tower(patches, grid_thw=grid.to(device)).last_hidden_state
        return output

    with mmgraph.attach(tower, config) as handle:
        call(), call()
        assert handle.stats().hits == 1
        set_data(tower)
        for _ in range(3):
            ours = call()
            with mmgraph.encoders.eager_towers():
                torch.testing.assert_close(ours, call(), rtol=1e-3, atol=1e-3)
        assert handle.stats().hits == 3


@torch.no_grad()
def test_a_patched_forward_that_is_patched_again_is_noticed(tower: nn.Module) -> None:
    mlp = block(tower).mlp
    original = type(mlp).forward
    mlp.forward = lambda x: original(mlp, x)
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, handle, replayed=True)
        mlp.forward = lambda x: original(mlp, x) * 2
        assert_right(tower, handle, replayed=True)
        del mlp.forward
        assert_right(tower, handle, replayed=True)


def alter_forward(tower: nn.Module) -> Callable[[], None]:
    mlp = block(tower).mlp
    mlp.forward = functools.partial(type(mlp).forward, mlp)
    return lambda: delattr(mlp, "forward")


def alter_attention(tower: nn.Module) -> Callable[[], None]:
    before = tower.config._attn_implementation
    tower.config._attn_implementation_internal = "eager"
    return lambda: setattr(tower.config, "_attn_implementation_internal", before)


@pytest.mark.parametrize("alter", [alter_forward, alter_attention])
def test_what_another_thread_alters_for_a_capture_is_no_change(
    tower: nn.Module, alter: Callable[[nn.Module], Callable[[], None]]
) -> None:
    """A model of timm has four methods, each with graphs and locks of its own."""
    turns = Turns()
    watch = TowerWatch(tower, turns)
    before, altered, leave = watch.version, threading.Event(), threading.Event()

    def capture() -> None:
        with turns.alone():
            undo = alter(tower)
            altered.set()
            assert leave.wait(20)
            undo()

    thread = threading.Thread(target=capture)
    thread.start()
    assert altered.wait(20)
    with ThreadPoolExecutor() as pool:
        seen = pool.submit(lambda: watch.version)
        assert not wait([seen], 0.1).done  # until the tower is what its user knows
        leave.set()
        assert seen.result(20) == before
    thread.join()
    assert watch.version == before
    undo = alter(tower)
    assert watch.version != before
    undo()
