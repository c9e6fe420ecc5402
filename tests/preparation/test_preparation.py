"""What makes graphs of a tower fast changes neither its answers nor what its user sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from mmgraph import CaptureError
from mmgraph.graphs.guard import CaptureGuard
from mmgraph.preparation import Preparation, align
from mmgraph.preparation.align import AlignedLinear, AlignedWeights
from mmgraph.preparation.blocks import compiled_blocks, find_blocks
from mmgraph.recipes import load_recipe

WIDTH, ODD = 256, 342
"""1,368 bytes of float32: no multiple of 16."""


class MLP(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, ODD, bias=bias)
        self.up = nn.Linear(WIDTH, ODD, bias=bias)
        self.down = nn.Linear(ODD, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Tower(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(MLP(bias=bias) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


@pytest.fixture(params=[True, False], ids=["bias", "no_bias"])
def tower(request: pytest.FixtureRequest) -> Tower:
    return Tower(bias=request.param).double().eval()


@torch.no_grad()
def test_padded_weights_give_the_same_numbers(tower: Tower) -> None:
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = tower(x)
    weights = AlignedWeights(tower.float())
    tower.double()
    assert (len(weights), weights.widths) == (9, {ODD: 384})
    weights = AlignedWeights(tower.float())
    with weights.applied():
        assert isinstance(tower.blocks[0].down, AlignedLinear)
        torch.testing.assert_close(tower(x.float()).double(), expected, atol=1e-5, rtol=1e-5)
    assert type(tower.blocks[0].down) is nn.Linear
    torch.testing.assert_close(tower(x.float()).double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_parameters_are_the_users_own_all_along(tower: Tower) -> None:
    tower.float()
    before = copy.deepcopy(tower.state_dict())
    parameters = dict(tower.named_parameters())
    pointers = {name: p.data_ptr() for name, p in parameters.items()}
    weights = AlignedWeights(tower)
    assert not any(product.weight.tensor.grad_fn for product in weights._products)
    for name, value in tower.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(dict(tower.named_parameters())[n] is p for n, p in parameters.items())
    assert {n for n, p in parameters.items() if p.data_ptr() != pointers[n]} == {
        n for n in parameters if "blocks" in n and (ODD in parameters[n].shape or "weight" in n)
    }
    weights.undo()
    assert all(p.is_contiguous() for p in tower.parameters())
    for name, parameter in tower.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert torch.equal(parameter, before[name]), name


@torch.no_grad()
@pytest.mark.parametrize(
    "update",
    [
        lambda tower, other: tower.load_state_dict(other.state_dict()),
        lambda tower, other: [
            p.copy_(q) for p, q in zip(tower.parameters(), other.parameters(), strict=True)
        ],
        lambda tower, other: torch.optim.SGD(tower.parameters(), lr=0.1).step(),
    ],
    ids=["load_state_dict", "copy", "optimizer"],
)
def test_weights_changed_in_place_are_followed(
    tower: Tower, update: Callable[[Tower, Tower], Any]
) -> None:
    tower.float()
    weights = AlignedWeights(tower)
    for parameter in tower.parameters():
        parameter.grad = torch.randn_like(parameter)
    update(tower, copy.deepcopy(tower).apply(_redraw))
    x = torch.randn(4, WIDTH)
    expected = tower(x)
    with weights.applied():
        torch.testing.assert_close(tower(x), expected, atol=1e-4, rtol=1e-4)


def _redraw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def test_tied_small_and_even_weights_stay_where_they_are() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(ODD, WIDTH), nn.Linear(ODD, WIDTH)
    model.b.weight = model.a.weight
    model.small, model.even = nn.Linear(30, 30), nn.Linear(WIDTH, WIDTH)
    assert len(AlignedWeights(model)) == 0


@torch.no_grad()
def test_a_model_is_saved_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=ODD,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
    )
    model = SiglipVisionModel(config).eval()
    pixels = torch.randn(2, 3, 28, 28)
    expected = model(pixels).last_hidden_state
    assert len(AlignedWeights(model)) >= 2
    model.save_pretrained(tmp_path)
    again = SiglipVisionModel.from_pretrained(tmp_path)
    assert {n: p.shape for n, p in again.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    torch.testing.assert_close(again(pixels).last_hidden_state, expected)
    size = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert size < 1.01 * sum(p.nbytes for p in model.parameters()) + 20_000


@torch.no_grad()
def test_towers_that_share_their_weights_share_the_padded_ones(tower: Tower) -> None:
    tower.float()
    twin = copy.deepcopy(tower, {id(p): p for p in tower.parameters()})
    weights = AlignedWeights(tower)
    pointers = [p.data_ptr() for p in tower.parameters()]
    others = AlignedWeights(twin)
    x = torch.randn(4, WIDTH)
    expected = tower(x)
    assert [p.data_ptr() for p in tower.parameters()] == pointers
    for last, tower_left, aligned in ((False, twin, others), (True, tower, weights)):
        with aligned.applied():
            assert isinstance(tower_left.blocks[0].down, AlignedLinear)
            torch.testing.assert_close(tower_left(x), expected, atol=1e-5, rtol=1e-5)
        aligned.undo()
        assert tower.blocks[0].down.weight.is_contiguous() is last
    torch.testing.assert_close(tower(x), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("replaced", ["weight", "bias"])
def test_a_layer_whose_parameters_were_replaced_uses_the_new_ones(replaced: str) -> None:
    tower = Tower().eval()
    weights = AlignedWeights(tower)
    parameter = getattr(tower.blocks[1].gate, replaced)
    parameter.data = torch.randn_like(parameter)
    x = torch.randn(4, WIDTH)
    expected = tower(x)
    with weights.applied():
        assert isinstance(tower.blocks[0].gate, AlignedLinear)
        assert type(tower.blocks[1].gate) is nn.Linear
        torch.testing.assert_close(tower(x), expected, atol=1e-4, rtol=1e-4)


def test_a_weight_that_was_replaced_is_left_alone() -> None:
    tower = Tower()
    weights = AlignedWeights(tower)
    mine = torch.randn(ODD, WIDTH)
    tower.blocks[0].gate.weight.data = mine
    weights.undo()
    assert tower.blocks[0].gate.weight.data_ptr() == mine.data_ptr()


@pytest.mark.parametrize(
    ("recipe", "count"),
    [("qwen2_5_vl:tiny", 4), ("siglip:tiny", 2), ("timm:tiny", 2), ("whisper:tiny", 2)],
)
def test_blocks_are_the_members_of_the_repeated_lists(recipe: str, count: int) -> None:
    blocks = find_blocks(load_recipe(recipe).build_encoder())
    assert len(blocks) == count
    assert len({type(block) for block in blocks}) == 1
    inside = {id(m) for b in blocks for m in b.modules() if m is not b}
    assert not any(id(b) in inside for b in blocks)


def _compile_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo without a code generator: what is tested is what we do around it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@torch.no_grad()
def test_compiled_blocks_share_code_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_eagerly(monkeypatch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tower = Tower().eval()
    expected = {n: tower(torch.ones(n, WIDTH)) for n in (3, 5, 7)}
    with compiled_blocks(tower) as count:
        assert count == 3
        for n, e in expected.items():
            torch.testing.assert_close(tower(torch.ones(n, WIDTH)), e)
    assert not any("forward" in block.__dict__ for block in tower.blocks)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@torch.no_grad()
def test_under_a_dispatch_mode_blocks_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled code ran where a mode has to see it")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: never)
    tower = Tower().eval()
    with compiled_blocks(tower), CaptureGuard():
        tower(torch.ones(2, WIDTH))
    with compiled_blocks(tower), pytest.raises(AssertionError, match="has to see it"):
        tower(torch.ones(2, WIDTH))


@torch.no_grad()
def test_a_compiler_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    tower = Tower().eval()
    preparation = Preparation(tower, "tower", compile_blocks=True)
    assert preparation.on_trial
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(preparation.run(lambda: tower(x)), tower(x))
    assert preparation.no_compile == "the compiler failed (RuntimeError: no C compiler)"
    assert not preparation.on_trial
    assert preparation.describe() == [f"blocks not compiled: {preparation.no_compile}"]


@torch.no_grad()
def test_a_compiler_that_gives_up_on_a_later_size_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(forward: Any, **_: Any) -> Any:
        def run(block: nn.Module, x: torch.Tensor) -> Any:
            if len(x) > 2:
                raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile limit exceeded")
            return forward(block, x)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    tower = Tower().eval()
    preparation = Preparation(tower, "tower", compile_blocks=True)
    for rows in (2, 3, 2):
        x = torch.rand(rows, WIDTH)
        torch.testing.assert_close(preparation.run(lambda x=x: tower(x)), tower(x))
    assert preparation.no_compile is not None
    assert "limit exceeded" in preparation.no_compile


@torch.no_grad()
def test_blocks_of_a_class_share_one_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask the compiler for it takes milliseconds, for each block in each run of a tower."""
    asked: list[Any] = []

    def compiled(forward: Any, **_: Any) -> Any:
        asked.append(forward)
        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    tower = Tower().eval()
    blocks = find_blocks(tower)
    x = torch.rand(2, WIDTH)
    expected = tower(x)
    with compiled_blocks(tower) as count:
        torch.testing.assert_close(tower(x), expected)
    assert len(blocks) == count > len(asked) == 1
    assert all("forward" not in block.__dict__ for block in blocks)


def test_a_forward_that_is_no_method_is_compiled_as_it_is() -> None:
    class Layer(nn.Module):
        forward = staticmethod(torch.sin)

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    tower = nn.Sequential(Layer(), Layer())
    x = torch.rand(3)
    with compiled_blocks(tower) as count:
        torch.testing.assert_close(tower(x), x.sin().sin())
    assert count == 2


@torch.no_grad()
def test_stages_of_many_widths_are_compiled_without_giving_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compile_eagerly(monkeypatch)
    torch._dynamo.reset()
    stages = [nn.Sequential(Block(8 * n), Block(8 * n)) for n in range(1, 10)]
    inputs = [torch.rand(3, 8 * n) for n in range(1, 10)]
    tower = nn.Module()
    for n, stage in enumerate(stages):
        tower.add_module(f"stage{n}", stage)
    with compiled_blocks(tower) as count:
        outputs = [stage(x) for stage, x in zip(stages, inputs, strict=True)]
    assert count == 18
    for stage, x, output in zip(stages, inputs, outputs, strict=True):
        torch.testing.assert_close(output, stage(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).relu()
        return out


@torch.no_grad()
def test_an_error_of_the_call_itself_is_no_fault_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compile_eagerly(monkeypatch)
    preparation = Preparation(Tower().eval(), "tower", compile_blocks=True)

    def refuses() -> None:
        raise CaptureError("it reads data on the host")

    def fails() -> None:
        raise ValueError("wrong shape")

    with pytest.raises(CaptureError, match="reads data"):
        preparation.run(refuses)
    with pytest.raises(ValueError, match="wrong shape"):
        preparation.run(fails)
    assert preparation.no_compile is None


@torch.no_grad()
def test_all_steps_together_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_eagerly(monkeypatch)
    tower = Tower().eval()
    x = torch.randn(6, WIDTH)
    expected = tower(x)
    preparation = Preparation(tower, "tower", align_weights=True, compile_blocks=True)
    torch.testing.assert_close(preparation.run(lambda: tower(x)), expected, atol=1e-5, rtol=1e-5)
    preparation.decide(None)
    assert preparation.describe() == [
        f"9 linear layers on padded weights ({ODD} to 384)",
        "3 blocks compiled",
    ]
    preparation.decide("2.0 ms, as they are 1.0 ms")
    assert preparation.describe()[1] == "blocks not compiled: 2.0 ms, as they are 1.0 ms"
    preparation.undo()
    torch.testing.assert_close(tower(x), expected)


@torch.no_grad()
def test_without_memory_to_move_them_weights_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tower, x = Tower().float().eval(), torch.randn(5, WIDTH)
    expected = tower(x)
    original, moves = align.move_into, [0]

    def fails_at_the_third(*arguments: Any) -> Any:
        moves[0] += 1
        if moves[0] == 3:
            raise torch.OutOfMemoryError("no memory")
        return original(*arguments)

    monkeypatch.setattr(align, "move_into", fails_at_the_third)
    preparation = Preparation(tower, "tower", align_weights=True, merge_weights=True)
    assert preparation.describe() == ["weights stay where they are: no memory to move them"]
    assert caplog.messages == ["tower: weights stay where they are: no memory"]
    assert all(p.is_contiguous() for p in tower.parameters())
    assert moves == [3]
    assert torch.equal(preparation.run(lambda: tower(x)), expected)


@torch.no_grad()
def test_without_memory_to_move_them_back_weights_are_right_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower, x = Tower().float().eval(), torch.randn(5, WIDTH)
    expected = tower(x)
    preparation = Preparation(tower, "tower", align_weights=True)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", fails)
        preparation.undo()
    assert torch.equal(tower(x), expected)
