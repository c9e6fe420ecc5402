"""Layers that read the same input are one product; surplus outputs stay on where harmless."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import SiglipVisionConfig, SiglipVisionModel

from mmgraph.preparation import Preparation
from mmgraph.preparation.align import AlignedWeights
from tests.preparation.towers import Tower

WIDTH, ODD = 256, 342


class Gated(nn.Module):
    """gate and up read the same input, through a product of odd widths."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, ODD)
        self.up_proj = nn.Linear(WIDTH, ODD, bias=False)
        self.down_proj = nn.Linear(ODD, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Query, key and value; `crossed` reads keys and values from elsewhere."""

    def __init__(self, *, crossed: bool = False, backwards: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.crossed, self.backwards = crossed, backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.flip(0) if self.crossed else x
        names = ["q_proj", "k_proj", "v_proj"]
        read = {"q_proj": x, "k_proj": other, "v_proj": other}
        order = reversed(names) if self.backwards else names
        out = {name: getattr(self, name)(read[name]) for name in order}
        heads = [out[name].view(x.shape[0], 4, -1).transpose(0, 1) for name in names]
        return F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "gated": Gated,
    "attention": Attention,
    "cross-attention": lambda: Attention(crossed=True),
    "the other way round": lambda: Attention(backwards=True),
}


@pytest.fixture(params=MODULES)
def tower(request: pytest.FixtureRequest) -> Tower:
    return Tower(MODULES[request.param]).eval()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights of all products."""
    shapes: list[tuple[int, ...]] = []
    original = F.linear

    def seen(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return original(x, weight, bias)

    monkeypatch.setattr(F, "linear", seen)
    return shapes


@torch.no_grad()
def test_the_numbers_are_the_same(tower: Tower) -> None:
    twin = copy.deepcopy(tower)
    weights = AlignedWeights(tower, merge=True)
    assert weights.num_merged == 3 * (2 if isinstance(twin.blocks[0], Gated) else 3)
    for _ in range(2):
        x = torch.randn(5, WIDTH)
        with weights.applied():
            torch.testing.assert_close(tower(x), twin(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tower(x), twin(x))
    weights.undo()
    for parameter in tower.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


@torch.no_grad()
def test_one_product_stands_for_neighbours(products: list[tuple[int, ...]]) -> None:
    x = torch.randn(5, WIDTH)
    for make, expected in (
        (Gated, [(2 * 384, WIDTH), (WIDTH, 384)]),
        (Attention, [(3 * WIDTH, WIDTH)]),
    ):
        module = make().eval()
        weights = AlignedWeights(module, merge=True)
        products.clear()
        with weights.applied():
            module(x)
        assert products == expected


@torch.no_grad()
def test_nothing_of_a_call_is_kept(tower: Tower) -> None:
    weights = AlignedWeights(tower, merge=True)
    with weights.applied():
        tower(torch.randn(5, WIDTH))
    assert all(p._input is None and p._output is None for p in weights._products)


@torch.no_grad()
@pytest.mark.slow  # the compiler takes half a minute
def test_compiled_blocks_share_one_code(tower: Tower) -> None:
    preparation = Preparation(
        tower, "tower", align_weights=True, merge_weights=True, compile_blocks=True
    )
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 7):
        x = torch.randn(rows, WIDTH)
        output = preparation.run(lambda x=x: tower(x))
        torch.testing.assert_close(output, tower(x), atol=1e-5, rtol=1e-5)
    assert preparation.no_compile is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@torch.no_grad()
def test_weights_changed_in_place_are_followed(tower: Tower) -> None:
    weights = AlignedWeights(tower, merge=True)
    tower.load_state_dict({n: torch.randn_like(p) / 20 for n, p in tower.state_dict().items()})
    x = torch.randn(4, WIDTH)
    expected = tower(x)
    with weights.applied():
        torch.testing.assert_close(tower(x), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_weight_that_was_replaced_is_used(tower: Tower) -> None:
    weights = AlignedWeights(tower, merge=True)
    layer = next(m for m in tower.modules() if type(m) is nn.Linear)
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    x = torch.randn(4, WIDTH)
    expected = tower(x)
    with weights.applied():
        torch.testing.assert_close(tower(x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("act", "wide"),
    [
        (F.silu, True),
        (torch.sigmoid, True),  # not zero at zero, but then it meets zero columns
        (lambda x: x / x.abs().sum(-1, keepdim=True).clamp_min(1e-6), True),
        (lambda x: F.layer_norm(x, x.shape[-1:]), False),
        (lambda x: x.view(-1, 2, ODD // 2).flatten(1), False),
        (lambda x: x.softmax(-1), False),
    ],
    ids=["silu", "sigmoid", "sum", "norm", "view", "softmax"],
)
def test_surplus_outputs_stay_on_where_they_do_no_harm(
    products: list[tuple[int, ...]], act: Callable[[torch.Tensor], torch.Tensor], wide: bool
) -> None:
    module = Gated(act).eval()
    x = torch.randn(5, WIDTH)
    expected = module(x)
    weights = AlignedWeights(module, merge=True)
    assert [p.rows for p in weights._products] == [[384 if wide else ODD] * 2, [WIDTH]]
    with weights.applied():
        torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


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
@pytest.mark.parametrize(
    "names", [["gate_proj"], ["up_proj"], ["down_proj"], ["gate_proj", "up_proj"]]
)
def test_adapters_see_the_width_that_is_theirs(names: list[str]) -> None:
    tower: Any = Tower(Gated).eval()
    weights = AlignedWeights(tower, merge=True)
    for name in names:
        setattr(tower.blocks[0], name, Adapter(getattr(tower.blocks[0], name)))
    x = torch.randn(5, WIDTH)
    expected = tower(x)
    with weights.applied():
        torch.testing.assert_close(tower(x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_adapters_on_query_key_and_value() -> None:
    tower: Any = Tower(Attention).eval()
    weights = AlignedWeights(tower, merge=True)
    tower.blocks[0].k_proj = Adapter(tower.blocks[0].k_proj)
    x = torch.randn(5, WIDTH)
    expected = tower(x)
    with weights.applied():
        torch.testing.assert_close(tower(x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_nothing_is_tried_out_on_hooks() -> None:
    module, called = Gated().eval(), []
    module.down_proj.register_forward_hook(lambda *_: called.append(1))
    weights = AlignedWeights(module, merge=True)
    assert not called
    assert weights._products[0].rows == [ODD] * 2


@torch.no_grad()
def test_a_model_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=ODD,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    model = SiglipVisionModel(config).eval()
    before = copy.deepcopy(model.state_dict())
    weights = AlignedWeights(model, merge=True)
    assert weights.num_merged == 6
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = SiglipVisionModel.from_pretrained(tmp_path).state_dict()
    stored = torch.load(tmp_path / "state.pt")
    for name, value in before.items():
        assert torch.equal(loaded[name], value), name
        assert torch.equal(stored[name], value), name


def test_tied_and_small_neighbours_stay_where_they_are() -> None:
    tied = Attention()
    tied.k_proj = tied.q_proj
    small = nn.Module()
    small.gate_proj, small.up_proj = nn.Linear(30, 30), nn.Linear(30, 30)
    for module in (tied, small):
        assert AlignedWeights(module, merge=True).num_merged == 0
