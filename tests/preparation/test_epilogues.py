"""Additions and gates in the products before them: where they move, and where that is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mmgraph.ops import WrongProductError, linear_add
from mmgraph.preparation import epilogues, rewriting
from mmgraph.preparation.align import AlignedWeights
from mmgraph.preparation.blocks import compiled_blocks
from mmgraph.preparation.epilogues import Epilogues
from mmgraph.preparation.rewriting import move_into_products
from tests.preparation.towers import Tower

WIDTH, INNER = 256, 512
ADD, GATE = torch.ops.mmgraph.linear_add.default, torch.ops.mmgraph.linear_swiglu.default


def filled(module: nn.Module) -> Any:
    """With biases that are seen in what comes out."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return module.bfloat16().eval()


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

    def moved_in(self, function: Callable[..., Any], *args: torch.Tensor) -> int:
        """How many moved in a function, which must give what it gave before."""
        torch._dynamo.reset()
        twins = [arg.clone() for arg in args]
        expected = function(*twins)
        before, compiled = self.moved, torch.compile(function, backend=self, dynamic=True)
        close(compiled(*args), expected)
        for arg, twin in zip(args, twins, strict=True):
            close(arg, twin)
        return self.moved - before


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
    block = filled(Block())
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
    block, seen = filled(make()), Seen()
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


W, B, SQUARE = (torch.randn(*s).bfloat16() / 4 for s in ((2 * 32, 16), (2 * 32,), (16, 16)))
NARROW = torch.randn(24, 16).bfloat16() / 4


def linear_of_16(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, SQUARE, B[:16])


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "moved"),
    [
        (lambda x, y: x + linear_of_16(y), 1),
        (lambda x, y: linear_of_16(y)[:, :16] + x, 1),
        (lambda x, y: x + linear_of_16(y)[::1], 1),
        (lambda x, y: x + linear_of_16(y).flip(0)[:], 0),
        (lambda x, y: x + F.dropout(linear_of_16(y), 0.0, True), 1),
        (lambda x, y: x.float() + linear_of_16(y), 0),  # another dtype
        (lambda x, y: x + F.linear(y, SQUARE.t()), 0),  # rows that don't lie together
        (lambda x, y: x + F.linear(y, W.view(16, 64)[:, ::4]), 0),
        (lambda x, y: x + F.linear(y, SQUARE, B[:1]), 0),
        (lambda x, y: x + F.linear(y, SQUARE, B[:32:2]), 0),
        (lambda x, y: x + (h := linear_of_16(y)) + h, 0),
        (lambda x, y: F.silu((h := F.linear(y, W, B))[..., :32]) * h[..., 32:], 1),
        (lambda x, y: (h := F.linear(y, W, B))[..., 32:] * F.silu(h[..., :32]), 1),
        (lambda x, y: F.silu((h := F.linear(y, W, B))[..., 32:]) * h[..., :32], 0),
        (lambda x, y: F.silu((h := F.linear(y, W, B))[..., :32]) * h[..., 32:] + h.sum(), 0),
        (lambda x, y: (g := F.silu((h := F.linear(y, W, B))[..., :32])) * h[..., 32:] + g, 0),
        (lambda x, y: F.silu((h := F.linear(y, W))[..., :32]) * (u := h[..., 32:]) + u, 0),
        (lambda x, y: F.silu(g := (h := F.linear(y, W))[..., :32]) * h[..., 32:] + g, 0),
        (lambda x, y: F.silu((h := F.linear(y, NARROW))[..., :12]) * h[..., 12:], 0),  # 12 columns
        (lambda x, y: F.silu(input=(h := F.linear(y, W))[..., :32]) * h[..., 32:], 0),
        (lambda x, y: x + F.dropout(input=linear_of_16(y), training=False), 0),
    ],
)
def test_what_moves_is_what_it_looks_like(function: Any, moved: int) -> None:
    x, y = (torch.randn(9, 16, dtype=torch.bfloat16) for _ in range(2))
    assert Seen().moved_in(function, x, y) == moved


def adds_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = linear_of_16(y)
    y += x
    return x + h


def multiplies_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y[:, :8].mul_(3)
    return x + linear_of_16(y)


def writes_elsewhere(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.add(x, y, out=x)
    return x + linear_of_16(y)


def sets_items(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = linear_of_16(y)
    x[:, 0] = 1
    return x + h


def activates_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = linear_of_16(y)
    F.silu(x, True)
    torch.relu_(y)
    return x + h


def copies_over(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = linear_of_16(y)
    torch.ops.aten.copy_.default(x, y)
    return x + h


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        adds_in_place,
        multiplies_in_place,
        writes_elsewhere,
        sets_items,
        activates_in_place,
        copies_over,
    ],
)
def test_where_memory_is_written_nothing_moves(function: Any) -> None:
    x, y = (torch.randn(9, 16, dtype=torch.bfloat16) for _ in range(2))
    assert Seen().moved_in(function, x, y) == 0


@torch.no_grad()
def test_under_an_autocast_of_its_own_nothing_moves() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.linear(y, SQUARE).to(x.dtype) + F.linear(x, SQUARE)

    x, y = (torch.randn(9, 16, dtype=torch.bfloat16) for _ in range(2))
    assert Seen().moved_in(function, x, y) == 0


class Choosing:
    """`Epilogues` on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []
        self.timed = 0
        self.has_any = True
        self.devices: list[torch.device] = []
        monkeypatch.setattr(epilogues, "_FEWEST_ROWS", 4)
        monkeypatch.setattr(epilogues, "milliseconds", self._milliseconds)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        self.epilogues = Epilogues()

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield

    def _milliseconds(self, run: Callable[[], Any]) -> float:
        assert self.devices
        run()
        self.timed += 1
        return self.times.pop(0)

    def ask(self, rows: int, fused: Any = None, kind: Any = "block", other: int = 1) -> bool:
        def apart(x: torch.Tensor, _: Any = None, **__: Any) -> torch.Tensor:
            return x.mul_(2)  # of memory that isn't the caller's

        def ours(*args: Any, **kwargs: Any) -> Any:
            if self.has_any:
                linear_add(SQUARE, SQUARE, None, SQUARE)
            return (fused or apart)(*args, **kwargs)

        x = torch.ones(rows, 8, dtype=torch.bfloat16)
        answer = self.epilogues.is_faster(
            kind, apart, ours, (x,), {"_": [x], "lengths": torch.ones(other)}
        )
        assert torch.equal(x, torch.ones_like(x))
        return answer


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Choosing:
    return Choosing(monkeypatch)


def test_each_size_takes_what_is_faster_and_is_timed_once(choosing: Choosing) -> None:
    choosing.times = [2.0, 1.0, 1.0, 0.98, 3.0, 1.0, 1.0, 4.0]
    for _ in range(2):
        assert choosing.ask(8)
        assert not choosing.ask(16)
        assert choosing.ask(8, kind="another")
        assert not choosing.ask(8, other=2)  # what only another argument shows
    assert choosing.timed == 8
    assert choosing.devices == [torch.device("cpu")] * 4
    assert choosing.epilogues.describe() == [
        "a block of 8 rows, additions and gates in its products: yes "
        "(us: apart 2000, in products 1000)",
        "a block of 8 rows, additions and gates in its products: yes "
        "(us: apart 3000, in products 1000)",
        "a block of 8 rows, additions and gates in its products: no "
        "(us: apart 1000, in products 4000)",
        "a block of 16 rows, additions and gates in its products: no "
        "(us: apart 1000, in products 980)",
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


def test_without_the_kernels_nothing_is_timed(
    choosing: Choosing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epilogues, "can_add", lambda _: False)
    assert not choosing.ask(8)
    assert choosing.timed == 0


def test_a_block_may_get_everything_by_name(choosing: Choosing) -> None:
    def block(*, x: torch.Tensor, scale: float) -> torch.Tensor:
        linear_add(SQUARE, SQUARE, None, SQUARE)
        return x * scale

    choosing.times = [2.0, 1.0]
    kwargs = {"scale": 2.0, "x": torch.ones(8, 8, dtype=torch.bfloat16)}
    assert choosing.epilogues.is_faster("block", block, block, (), kwargs)


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError("no kernel\nfor this")


def is_wrong(*_: Any, **__: Any) -> Any:
    raise WrongProductError("the result of a product is wrong")


@pytest.mark.parametrize(
    ("fused", "why"),
    [
        (fails, "ValueError: no kernel"),
        (is_wrong, "WrongProductError: the result of a product is wrong"),
    ],
)
def test_what_fails_or_is_wrong_is_given_up(choosing: Choosing, fused: Any, why: str) -> None:
    assert not choosing.ask(8, fused)
    assert choosing.epilogues.describe() == [f"additions and gates not in their products: {why}"]
    assert not choosing.ask(8)  # for good
    assert choosing.timed == 0
    choosing.times = [2.0, 1.0]
    assert choosing.ask(8, kind="another")


def test_a_wrong_kernel_is_noticed(choosing: Choosing, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(x: Any, weight: Any, rows: Any, *, out: Any, bias: Any, tuned: bool) -> None:
        out.copy_(1.1 * (rows + x @ weight))

    monkeypatch.setattr("mmgraph.ops.epilogues.can_add", lambda _: True)
    monkeypatch.setattr("mmgraph.ops.epilogues._add_kernel", lambda: add)
    assert not choosing.ask(8)
    assert list(choosing.epilogues.given_up) == ["block"]


def test_a_block_without_any_is_compiled_in_one_way(choosing: Choosing) -> None:
    choosing.has_any = False
    assert not choosing.ask(8)
    assert choosing.epilogues.describe() == []
    choosing.has_any, choosing.times = True, [2.0, 1.0]
    assert not choosing.ask(16)  # it hasn't at other sizes either
    assert choosing.timed == 0
    assert choosing.ask(16, kind="another")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")]
)
def test_memory_that_runs_out_is_not_hidden(choosing: Choosing, error: Exception) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        choosing.ask(8, runs_out)
    assert not choosing.epilogues.given_up
    choosing.times = [2.0, 1.0]
    assert choosing.ask(8)  # once there is room


def test_copies_lie_in_memory_as_the_arguments_do() -> None:
    base = torch.randn(4, 6)
    args = (base, base[1:, ::2], base.t(), torch.ones(1).expand(5), [base])
    (a, b, c, d, (e,)), kwargs = epilogues._copied(args, {"again": base})
    for copy, original in zip((a, b, c, d), args, strict=False):
        assert torch.equal(copy, original)
        assert copy.stride() == original.stride()
    a[1, 0] = 7
    assert b[0, 0] == c[0, 1] == e[1, 0] == kwargs["again"][1, 0] == 7
    assert base[1, 0] != 7


@torch.no_grad()
def test_compiled_blocks_take_the_way_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph)
    compiled = torch.compile

    def eagerly(function: Any, **options: Any) -> Any:
        return compiled(function, **{"backend": "eager", **options})

    monkeypatch.setattr(torch, "compile", eagerly)
    ran: list[torch.device] = []
    monkeypatch.setattr("mmgraph.ops.epilogues.can_add", ran.append)
    for _ in range(2):  # attached twice
        choosing = Choosing(monkeypatch)
        choosing.times = [2.0, 1.0, 1.0, 2.0]
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
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one for each way


@torch.no_grad()
def test_towers_of_many_widths_are_compiled_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph)
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled(f, **{"backend": "eager", **options})
    )
    for width in range(16, 16 + 8 * 8, 8):
        choosing = Choosing(monkeypatch)
        choosing.times = [2.0, 1.0]

        tower = nn.Sequential(Widths(width), Widths(width)).bfloat16().eval()
        x = torch.randn(8, width, dtype=torch.bfloat16)
        with compiled_blocks(tower, choosing.epilogues):
            close(tower(x), tower(x))
        assert choosing.timed == 2
        assert not choosing.epilogues.given_up


class Widths(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(x)
