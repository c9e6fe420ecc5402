"""Additions and gates in the products before them: where they move, and where that is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mmgraph.ops import WrongProductError
from mmgraph.preparation import epilogues, rewriting
from mmgraph.preparation.align import AlignedWeights
from mmgraph.preparation.blocks import compiled_blocks
from mmgraph.preparation.epilogues import Epilogues
from mmgraph.preparation.rewriting import move_into_products
from tests.preparation.towers import Tower

WIDTH, INNER = 256, 512
ADD, GATE = torch.ops.mmgraph.linear_add.default, torch.ops.mmgraph.linear_swiglu.default


class MLP(nn.Module):
    """Gate and up, which are one product once they are merged."""

    def __init__(self, *, dropout: float = 0.0, inner: int = INNER, act: Any = F.silu) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, inner)
        self.up_proj = nn.Linear(WIDTH, inner)
        self.down_proj = nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return self.dropout(out)


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.norm(x))
        return self.mlp(self.norm(x)) + x


class Twice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 2 + out


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, super().forward(x), alpha=2)


class Wider(nn.Linear):
    """What is added has another shape."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:1]) + x


class Seen:
    """The graphs that come out, without a code generator."""

    def __init__(self) -> None:
        self.targets: list[Any] = []
        self.moved = 0

    def __call__(self, graph: fx.GraphModule, _: Any) -> Any:
        self.moved += move_into_products(graph)
        self.targets += [node.target for node in graph.graph.nodes]
        return graph

    def count(self, target: Any) -> int:
        return self.targets.count(target)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the kernels were there: the operators compute the same without."""
    monkeypatch.setattr(epilogues, "can_add", lambda _: True)
    monkeypatch.setattr(rewriting, "can_add", lambda _: True)
    monkeypatch.setattr(rewriting, "can_gate", lambda _: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def close(output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(output, expected, atol=3e-2, rtol=3e-2)


@torch.no_grad()
def test_a_block_ends_its_products_with_additions_and_its_gate() -> None:
    block = Block().bfloat16().eval()
    x = torch.randn(9, WIDTH, dtype=torch.bfloat16)
    expected, seen = block(x), Seen()
    weights = AlignedWeights(block, merge=True)
    with weights.applied():
        output = torch.compile(block, backend=seen, dynamic=True)(x)
    close(output, expected)
    assert (seen.count(ADD), seen.count(GATE), seen.moved) == (2, 1, 3)
    assert F.silu not in seen.targets


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "added", "gated"),
    [
        (Block, 2, 0),  # gate and up are products of their own
        (lambda: Block(lambda: MLP(dropout=0.5)), 2, 0),  # which eval() switches off
        (lambda: Block(Twice), 1, 0),  # but for what is read twice
        (lambda: Block(Scaled), 1, 0),
        (lambda: Block(Wider), 1, 0),
    ],
    ids=["apart", "dropout", "twice", "alpha", "shape"],
)
def test_what_isnt_an_addition_to_a_product_stays(
    make: Callable[[], nn.Module], added: int, gated: int
) -> None:
    block, seen = make().bfloat16().eval(), Seen()
    x = torch.randn(9, WIDTH, dtype=torch.bfloat16)
    expected = block(x)
    close(torch.compile(block, backend=seen, dynamic=True)(x), expected)
    assert (seen.count(ADD), seen.count(GATE)) == (added, gated)


@torch.no_grad()
@pytest.mark.parametrize("act", [F.relu, lambda x: F.silu(x) + 0 * x], ids=["relu", "twice"])
def test_another_gate_stays(act: Any) -> None:
    mlp, seen = MLP(act=act).bfloat16().eval(), Seen()
    x = torch.randn(9, WIDTH, dtype=torch.bfloat16)
    expected = mlp(x)
    with AlignedWeights(mlp, merge=True).applied():
        close(torch.compile(mlp, backend=seen, dynamic=True)(x), expected)
    assert seen.moved == 0


@torch.no_grad()
def test_dropout_that_drops_and_other_dtypes_stay() -> None:
    for block in (Block(lambda: MLP(dropout=0.5)).bfloat16().train(), Block().eval()):
        seen = Seen()
        x = torch.randn(9, WIDTH, dtype=block.proj.weight.dtype)
        torch.compile(block, backend=seen, dynamic=True)(x)
        assert seen.count(ADD) == (1 if block.training else 0)


@torch.no_grad()
def test_widths_that_the_kernels_dont_take_stay() -> None:
    block, seen = Block(lambda: MLP(inner=300)).bfloat16().eval(), Seen()
    x = torch.randn(9, WIDTH, dtype=torch.bfloat16)
    torch.compile(block, backend=seen, dynamic=True)(x)
    assert seen.count(ADD) == 1


@torch.no_grad()
def test_padding_of_the_last_product_is_no_obstacle() -> None:
    """It is cut off by a slice that takes everything."""
    block, seen = Block(lambda: MLP(inner=300)).bfloat16().eval(), Seen()
    x = torch.randn(9, WIDTH, dtype=torch.bfloat16)
    expected = block(x)
    with AlignedWeights(block, merge=True).applied():
        close(torch.compile(block, backend=seen, dynamic=True)(x), expected)
    assert (seen.count(ADD), seen.count(GATE)) == (2, 1)


class Choosing:
    """`Epilogues` on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []
        self.timed = 0
        self.compiles = 1
        monkeypatch.setattr(epilogues, "_FEWEST_ROWS", 4)
        monkeypatch.setattr(epilogues, "milliseconds", self._milliseconds)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.epilogues = Epilogues()

    def _milliseconds(self, run: Callable[[], Any]) -> float:
        run()
        self.timed += 1
        return self.times.pop(0)

    def ask(self, rows: int, fused: Any = None, kind: Any = "block") -> bool:
        def apart(x: torch.Tensor, _: Any = None) -> torch.Tensor:
            return x * 2

        def ours(*args: Any, **kwargs: Any) -> Any:
            self.epilogues._moved += self.compiles  # as the compiler does at the first call
            return (fused or apart)(*args, **kwargs)

        x = torch.ones(rows, 8, dtype=torch.bfloat16)
        answer = self.epilogues.is_faster(kind, apart, ours, (x,), {"_": [x]})
        assert torch.equal(x, torch.ones_like(x))
        return answer


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Choosing:
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    return Choosing(monkeypatch)


def test_each_size_takes_what_is_faster_and_is_timed_once(choosing: Choosing) -> None:
    choosing.times = [2.0, 1.0, 1.0, 2.0, 3.0, 1.0]
    for _ in range(2):
        assert choosing.ask(8)
        assert not choosing.ask(16)
        assert choosing.ask(8, kind="another")
    assert choosing.timed == 6
    assert choosing.epilogues.describe() == [
        "a block of 8 rows, additions and gates in its products: yes "
        "(us: apart 2000, in products 1000)",
        "a block of 8 rows, additions and gates in its products: yes "
        "(us: apart 3000, in products 1000)",
        "a block of 16 rows, additions and gates in its products: no "
        "(us: apart 1000, in products 2000)",
    ]


def test_few_rows_and_what_is_being_recorded_arent_timed(
    choosing: Choosing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not choosing.ask(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choosing.ask(8)
    assert choosing.timed == 0
    assert not choosing.epilogues.choices
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    choosing.times = [2.0, 1.0]
    assert choosing.ask(8)  # nothing was decided before
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choosing.ask(8)


def test_what_fails_or_is_wrong_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no kernel\nfor this")

    def is_wrong(*_: Any, **__: Any) -> Any:
        raise WrongProductError("the result of a product is wrong")

    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    for fused, why in (
        (fails, "it failed (ValueError: no kernel)"),
        (is_wrong, "the result of a product is wrong"),
    ):
        choosing = Choosing(monkeypatch)
        assert not choosing.ask(8, fused)
        assert choosing.epilogues.why_not == why
        assert choosing.epilogues.describe() == [
            f"additions and gates not in their products: {why}"
        ]
        assert not choosing.ask(8)  # for good
        assert choosing.timed == 0


def test_a_block_without_any_is_compiled_in_one_way(choosing: Choosing) -> None:
    choosing.compiles = 0
    assert not choosing.ask(8)
    assert choosing.epilogues.describe() == []
    choosing.compiles, choosing.times = 1, [2.0, 1.0]
    assert not choosing.ask(16)  # it hasn't at other sizes either
    assert choosing.timed == 0
    assert choosing.ask(16, kind="another")


def test_memory_that_runs_out_is_not_hidden(choosing: Choosing) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        choosing.ask(8, runs_out)
    assert choosing.epilogues.why_not is None


@torch.no_grad()
def test_compiled_blocks_take_the_way_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph)
    compiled = torch.compile

    def eagerly(function: Any, **options: Any) -> Any:
        return compiled(function, **{"backend": "eager", **options})

    monkeypatch.setattr(torch, "compile", eagerly)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    choosing = Choosing(monkeypatch)
    choosing.times = [2.0, 1.0, 1.0, 2.0]
    ran: list[torch.device] = []
    monkeypatch.setattr("mmgraph.ops.epilogues.can_add", ran.append)
    tower = Tower(Block).bfloat16().eval()
    for rows, expected_runs in ((8, 2 * 3), (16, 0)):
        x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
        expected = tower(x)
        with compiled_blocks(tower, choosing.epilogues):
            tower(x)  # decides
        ran.clear()
        with compiled_blocks(tower, choosing.epilogues):  # each capture wraps the blocks anew
            close(tower(x), expected)
        assert len(ran) == expected_runs
    assert choosing.timed == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
