"""GELU as the last step of the product before it: where it is right, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmgraph.ops import linear_gelu
from mmgraph.preparation import Preparation
from mmgraph.preparation.activation import FusedActivations, GeluLinear, Unchanged
from mmgraph.recipes import load_recipe
from tests.preparation.towers import Tower

WIDTH, INNER = 64, 128


class MLP(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.fc2 = nn.Linear(INNER, WIDTH)  # in another order than they are called
        self.act = act or nn.GELU(approximate="tanh")
        self.fc1 = nn.Linear(WIDTH, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Residual(MLP):
    """What the layer gives is read twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x)
        out: torch.Tensor = self.fc2(self.act(hidden) + hidden)
        return out


class Twice(MLP):
    """The activation is called for something else as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(self.act(x))))
        return out


class After(MLP):
    """The activation comes last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.fc2(self.fc1(x)))
        return out


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (MLP, ["fc1"] * 3),
        (After, []),  # not the layer that reads what the module gets
        (Residual, []),
        (Twice, []),
        (lambda: MLP(nn.GELU()), []),  # the exact one
        (lambda: MLP(nn.ReLU()), []),
    ],
    ids=["mlp", "after", "residual", "twice", "erf", "relu"],
)
def test_the_step_moves_where_that_is_right(make: Callable[[], Any], fused: list[str]) -> None:
    tower = Tower(make).eval()
    classes = {name: type(module) for name, module in tower.named_modules()}
    x = torch.randn(2, 5, WIDTH)
    expected = tower(x)
    activations = FusedActivations(tower)
    assert len(activations) == len(fused)
    with activations.applied():
        found = [n.split(".")[-1] for n, m in tower.named_modules() if type(m) is GeluLinear]
        assert found == fused
        assert sum(type(m) is Unchanged for m in tower.modules()) == len(fused)
        torch.testing.assert_close(tower(x), expected)
    assert {name: type(module) for name, module in tower.named_modules()} == classes


@torch.no_grad()
@pytest.mark.slow  # the compiler takes half a minute
def test_blocks_share_one_code() -> None:
    tower = Tower(MLP).eval()
    preparation = Preparation(tower, "tower", fuse_activations=True, compile_blocks=True)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 7):
        x = torch.randn(2, rows, WIDTH)
        torch.testing.assert_close(preparation.run(lambda x=x: tower(x)), tower(x))
    assert preparation.no_compile is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@torch.no_grad()
def test_what_somebody_changed_stays_theirs() -> None:
    tower = Tower(MLP).eval()
    activations = FusedActivations(tower)
    tower.blocks[0].act.__class__ = nn.Tanh
    tower.blocks[1].fc1.__class__ = type("Theirs", (nn.Linear,), {})
    x = torch.randn(5, WIDTH)
    expected = tower(x)
    with activations.applied():
        torch.testing.assert_close(tower(x), expected)
        assert type(tower.blocks[2].fc1) is GeluLinear
        assert not any(type(tower.blocks[i].fc1) is GeluLinear for i in (0, 1))


class Adapter(nn.Module):
    """What PEFT puts in the place of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.delta(x)
        return out


@torch.no_grad()
def test_an_adapter_comes_before_the_activation() -> None:
    tower = Tower(MLP).eval()
    activations = FusedActivations(tower)
    tower.blocks[0].fc1 = Adapter(tower.blocks[0].fc1)
    x = torch.randn(5, WIDTH)
    expected = tower(x)
    with activations.applied():
        torch.testing.assert_close(tower(x), expected)
        assert type(tower.blocks[0].fc1.base) is nn.Linear
        assert type(tower.blocks[1].fc1) is GeluLinear
    tower.blocks[0].fc1 = tower.blocks[0].fc1.base
    with activations.applied():
        assert type(tower.blocks[0].fc1) is GeluLinear


@torch.no_grad()
def test_an_activation_that_gets_a_forward_of_its_own_keeps_its_work() -> None:
    """As accelerate's hooks do: another class would change nothing, and it would be done twice."""
    tower = Tower(MLP).eval()
    activations = FusedActivations(tower)
    act, x = tower.blocks[0].act, torch.randn(5, WIDTH)
    act.__dict__["forward"] = act.forward
    expected = tower(x)
    with activations.applied():
        torch.testing.assert_close(tower(x), expected)
        assert type(tower.blocks[0].fc1) is nn.Linear
        assert type(tower.blocks[1].fc1) is GeluLinear


@torch.no_grad()
def test_nothing_is_tried_out_on_hooks_or_while_training() -> None:
    tower, called = Tower(MLP).eval(), []
    tower.blocks[0].act.register_forward_hook(lambda *_: called.append(1))
    tower.blocks[1].train()
    assert len(FusedActivations(tower)) == 1
    assert not called


def test_released_towers_have_them() -> None:
    for name, pairs in (("qwen3_vl:tiny", 2), ("siglip:tiny", 2), ("clip:tiny", 0)):
        tower = load_recipe(name).build_encoder()
        assert len(FusedActivations(tower)) >= pairs, name
        assert bool(FusedActivations(tower)) == bool(pairs), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 3, WIDTH), (0, WIDTH)])
def test_the_operator(device: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight, bias = (
            torch.randn(*s, device=device).to(dtype) for s in (shape, (INNER, WIDTH), (INNER,))
        )
        weight = weight / 8
        output = linear_gelu(x, weight, bias)
        exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
        eager = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        assert output.shape == eager.shape
        assert output.dtype == dtype
        error, eager_error = ((o.double() - exact).norm() for o in (output, eager))
        assert error <= 1.1 * eager_error + 1e-12
