"""What a tower gives in float32, from a copy that leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import attach
from mmgraph.encoders import TowerEncoder, encoder_for, find_towers
from mmgraph.graphs import flatten
from mmgraph.modules.placement import widened
from mmgraph.preparation import Preparation
from mmgraph.protocol import SupportsReference
from mmgraph.recipes import load_recipe
from tests.encoders.cases import LAYOUTS, call_of
from tests.modules.test_caches import Memoises, of_module

pytestmark = pytest.mark.usefixtures("without_gradients")
BF16 = torch.bfloat16


def make_tower(layout: str, device: str = "cpu") -> nn.Module:
    return load_recipe(LAYOUTS[layout]).build_encoder(device=device, dtype=BF16)


def encoder_of(tower: nn.Module) -> TowerEncoder:
    return encoder_for(find_towers(tower)[0])


def float32_call(layout: str, device: str = "cpu") -> dict[str, Any]:
    """What bfloat16 can hold, in float32."""
    call = {name: value.to(device) for name, value in call_of(layout).items()}
    return {n: v.to(BF16).float() if v.is_floating_point() else v for n, v in call.items()}


def tensors(output: Any) -> list[torch.Tensor]:
    return flatten(output)[0]


def assert_is_right(reference: Any, expected: Any) -> None:
    for a, b in zip(tensors(reference), tensors(expected), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_it_is_what_a_tower_in_float32_gives(layout: str, device: str) -> None:
    tower, call = make_tower(layout, device), float32_call(layout, device)
    expected = copy.deepcopy(tower).float()(**call)
    before, names = copy.deepcopy(tower.state_dict()), set(vars(tower))
    addresses = [p.data_ptr() for p in tower.parameters()]
    encoder, state = encoder_of(tower), torch.get_rng_state()
    assert isinstance(encoder, SupportsReference)
    assert_is_right(encoder.embed_in_float32(**call), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(tower)) == names
    assert [p.data_ptr() for p in tower.parameters()] == addresses
    assert all(torch.equal(value, before[name]) for name, value in tower.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_attached_tower_gives_the_same_and_counts_nothing(layout: str) -> None:
    tower, call = make_tower(layout), float32_call(layout)
    expected = copy.deepcopy(tower).float()(**call)
    with attach(tower) as handle:
        version = vars(tower)["forward"].encoder.version()
        assert_is_right(vars(tower)["forward"].encoder.embed_in_float32(**call), expected)
        assert vars(tower)["forward"].encoder.version() == version
        assert handle.stats().items == 0


def test_another_method_is_called_where_that_is_the_tower_s() -> None:
    tower = load_recipe("timm:tiny").build_encoder(dtype=BF16)
    (found,) = find_towers(tower)
    encoder = encoder_for(found, "forward_features")
    (row,) = encoder.example_call().values()
    expected = copy.deepcopy(tower).float().forward_features(row.float())
    assert_is_right(encoder.embed_in_float32(x=row.float()), expected)


class Tied(nn.Module):
    """Reads one weight in two layers, and has odd widths besides."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, 256) for _ in range(3))
        self.odd = nn.Linear(256, 342)
        self.first, self.second = nn.Linear(342, 342), nn.Linear(342, 342)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(8.0)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.q_proj(x) + self.k_proj(x) * self.v_proj(x)
        return self.second(self.first(self.odd(x)))


def test_weights_on_padded_storage_and_tied_ones_come_out_right() -> None:
    module = Tied().to(BF16).eval()
    x, expected = torch.randn(3, 256), copy.deepcopy(module).float()
    preparation = Preparation(module, "tower", align_weights=True, merge_weights=True)
    assert module.odd.weight.untyped_storage().nbytes() > module.odd.weight.nbytes
    twin = widened(module)
    torch.testing.assert_close(twin(x), expected(x), rtol=1e-5, atol=1e-5)
    assert twin.second.weight is twin.first.weight
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        assert tensor.dtype == torch.float32, name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    preparation.undo()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "sdpa", "eager"])
def test_attention_that_is_for_half_precision_only_is_replaced(implementation: str) -> None:
    tower = make_tower("rows")
    tower.config._attn_implementation_internal = implementation
    twin: Any = widened(tower)
    ours = "sdpa" if "flash" in implementation else implementation
    assert twin.config._attn_implementation_internal == ours
    assert tower.config._attn_implementation_internal == implementation


def test_quantised_weights_are_not_widened() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="plain"):
        widened(module)
    module.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match="plain"):
        widened(module)


def test_caches_of_the_tower_s_functions_keep_nothing_of_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noted(module: nn.Module) -> nn.Module:
        twin = widened(module)
        copies.append(weakref.ref(twin))
        return twin

    copies: list[weakref.ref[nn.Module]] = []
    monkeypatch.setattr("mmgraph.encoders.tower.widened", noted)
    tower = Memoises().to(BF16).eval()
    try:
        encoder_of(tower).embed_in_float32(pixel_values=torch.rand(2, 3, 4, 4))
        gc.collect()
        (twin,) = copies
        assert twin() is None
        assert of_module.cache_info().currsize == 0
    finally:
        of_module.cache_clear()
        Memoises.of_method.cache_clear()
