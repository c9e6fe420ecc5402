"""Blocks in which folding has nothing to do may run code that it can't see into."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmgraph import CaptureError
from mmgraph.graphs import BreakableGraph, GraphBackend, capture_exact, in_region
from mmgraph.graphs.trees import tensors_in

GRID = [1, 2, 3]
Plain = Callable[..., Any]


class Block:
    """Runs one way or the other, and lists which."""

    def __init__(self, plain: Plain, fast: Plain | None = None) -> None:
        self.plain = plain
        self.fast = fast or plain
        self.ways: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return in_region(self._plain, self._fast, args, kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        self.ways.append("plain")
        return self.plain(*args, **kwargs)

    def _fast(self, *args: Any, **kwargs: Any) -> Any:
        self.ways.append("fast")
        return self.fast(*args, **kwargs)

    @property
    def recorded(self) -> str:
        """The way that went into the graph, which comes last."""
        return self.ways[-1]


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.rand(4, 8, device=device)


@pytest.fixture
def grid(device: str) -> torch.Tensor:
    return torch.tensor(GRID, device=device)


def capture(
    backend: GraphBackend, forward: Plain, x: torch.Tensor, *constants: torch.Tensor
) -> BreakableGraph:
    return capture_exact(backend, lambda b: tensors_in(forward(b["x"])), {"x": x}, constants)


@torch.no_grad()
def assert_follows(graph: BreakableGraph, forward: Plain, x: torch.Tensor) -> None:
    for low, high in ((0.1, 1), (-1, -0.1), (-1, 1)):
        x.uniform_(low, high)
        expected = tensors_in(forward(x.clone()))
        for output, value in zip(graph.replay(), expected, strict=True):
            torch.testing.assert_close(output, value)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def doubled_at_once(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.ones((), device=x.device), x, alpha=2)


def test_outside_a_capture_a_block_runs_fast(x: torch.Tensor) -> None:
    block = Block(doubled, doubled_at_once)
    torch.testing.assert_close(block(x), doubled(x))
    assert block.ways == ["fast"]


def test_a_block_that_keeps_to_itself_is_recorded_fast(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    blocks = [Block(doubled, doubled_at_once) for _ in range(2)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = blocks[0](x[: int(grid[1])])  # is folded before a block, between two and afterwards
        x = blocks[1](x * int(grid[2])) + grid.sum().item()
        return x * torch.tensor(GRID[1:], device=x.device).repeat(4)

    graph = capture(backend, forward, x, grid)
    assert [block.recorded for block in blocks] == ["fast", "fast"]
    assert all(block.ways[:2] == ["plain", "plain"] for block in blocks)  # warm, and observed
    assert_follows(graph, forward, x)


def test_a_block_that_writes_in_its_own_memory_is_recorded_fast(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.view(-1).add_(1)
        return y

    block = Block(plain, doubled_at_once)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return block(x) * int(grid[2])

    graph = capture(backend, forward, x, grid)
    assert block.recorded == "fast"
    assert_follows(graph, forward, x)


def reads_a_size(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x * int(grid[1])


def uploads_a_table(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(GRID[1:2], device=x.device)


def moves_a_constant(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x * grid.cpu().to(x.device)[1]


def counts_a_mask(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x[(grid > 1).nonzero().squeeze(1)]


def picks_with_a_mask(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x[:3][grid > 1]


def writes_to_its_input(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def writes_to_a_view_of_its_input(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    x[:2].mul_(2)
    return x + 1


@pytest.mark.parametrize(
    "plain",
    [
        reads_a_size,
        uploads_a_table,
        moves_a_constant,
        counts_a_mask,
        picks_with_a_mask,
        writes_to_its_input,
        writes_to_a_view_of_its_input,
    ],
)
def test_what_folding_has_to_see_is_recorded_plain(
    plain: Plain, x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    moves_nothing = plain is moves_a_constant and not x.is_cuda
    block, next_block = Block(plain), Block(doubled, doubled_at_once)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return next_block(block(x * 1.5, grid)) * int(grid[2])

    graph = capture(backend, forward, x, grid)
    assert block.recorded == ("fast" if moves_nothing else "plain")
    assert next_block.recorded == "fast"
    assert_follows(graph, forward, x)


class Reads(nn.Module):
    """Reads contents, so that captures break around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum() > 0)


def test_blocks_around_and_inside_a_break(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(doubled, doubled_at_once)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) * float(x.sum() > 0)

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader, self.inner = Reader(), Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(broken(self.reader(x)) * int(grid[2]))

    forward = Tower()
    broken = Block(lambda x: forward.inner(x) + 1)
    last = Block(doubled, doubled_at_once)
    graph = capture(backend, forward, x, grid)
    assert graph.num_breaks == 2
    assert (broken.recorded, last.recorded) == ("plain", "fast")
    assert_follows(graph, forward, x)


def test_constants_that_a_fast_block_reads_live_as_long_as_the_graph(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    held: list[torch.Tensor] = []

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * (held[-1] - 1)  # not handed over, and a constant that is made of a constant

    def fast(x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(-x, x, held[-1])

    block = Block(plain, fast)

    def forward(x: torch.Tensor) -> torch.Tensor:
        held[:] = [torch.arange(8, device=x.device) * int(grid[1])]
        return block(x)

    graph = capture(backend, forward, x, grid)
    assert block.recorded == "fast"
    held.clear()
    gc.collect()
    junk = [torch.full((8,), 99, device=x.device) for _ in range(64)]
    assert_follows(graph, forward, x)
    assert len(junk) == 64


def test_a_constant_that_a_fast_block_makes_may_be_written_afterwards(
    x: torch.Tensor, backend: GraphBackend
) -> None:
    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.zeros(3, device=x.device)

    block = Block(plain)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, mask = block(x)
        mask[:1] += 7
        return y, mask * 6

    assert_follows(capture(backend, forward, x), forward, x)
    assert block.recorded == "fast"


def test_a_constant_that_a_fast_block_reads_may_be_written_afterwards(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    block = Block(lambda x, n: x + n * 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        n = torch.ones(8, device=x.device)
        y = block(x, n)
        n += 1
        y = block(y, n) * n
        n += int(grid[0])
        return y + n

    assert_follows(capture(backend, forward, x, grid), forward, x)
    assert block.recorded == "fast"


def test_attention_that_drops_nothing_may_be_hidden(x: torch.Tensor, backend: GraphBackend) -> None:
    """torch counts it among what takes random numbers, which a block that is hidden may not."""

    def attends(x: torch.Tensor, p: float = 0.0) -> torch.Tensor:
        heads = x.view(1, 2, 4, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).reshape_as(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return block(x) + 1

    block = Block(attends)
    graph = capture(backend, forward, x)
    assert (block.recorded, graph.num_fast) == ("fast", 1)
    assert_follows(graph, forward, x)
    for random in (lambda x: attends(x, 0.5), lambda x: x + torch.rand_like(x)):
        block = Block(random)
        graph = capture(backend, forward, x)
        assert (block.recorded, graph.num_fast) == ("plain", 0)


def test_a_block_inside_a_block(x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend) -> None:
    inner, last = Block(doubled, doubled_at_once), Block(doubled, doubled_at_once)
    outer = Block(lambda x: inner(x) * int(grid[1]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return last(outer(x))

    graph = capture(backend, forward, x, grid)
    assert [block.recorded for block in (outer, inner, last)] == ["plain", "fast", "fast"]
    assert_follows(graph, forward, x)


@pytest.mark.parametrize("change", [1, -1])
def test_a_run_with_other_blocks_than_the_observed_one_is_no_capture(
    change: int, x: torch.Tensor, backend: GraphBackend
) -> None:
    block, runs = Block(doubled, doubled_at_once), [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        for _ in range(2 + (change if runs[0] > 2 else 0)):
            x = block(x)
        return x

    with pytest.raises(CaptureError, match="two runs of the same call differ"):
        capture(backend, forward, x)
    assert block(x) is not None  # nothing stays open
    assert block.recorded == "fast"


def test_a_fast_way_that_fails_leaves_nothing_open(x: torch.Tensor, backend: GraphBackend) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no code for this")

    block = Block(doubled, fails)
    with pytest.raises(CaptureError, match="no code for this"):
        capture(backend, block, x)
    assert torch._C._len_torch_dispatch_stack() == 0
    block.fast = doubled
    assert_follows(capture(backend, block, x), block, x)


@pytest.mark.gpu
def test_compiled_blocks_lie_in_an_exact_graph(
    x: torch.Tensor, grid: torch.Tensor, backend: GraphBackend
) -> None:
    """Code of the compiler has to be made in the warm-ups and not while a stream captures."""
    linear = nn.Linear(8, 8, device=x.device).requires_grad_(False)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return linear(x).sin() * 2 + x

    compiled = torch.compile(plain, dynamic=True)
    block = Block(plain, compiled)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return block(block(x[: int(grid[2])]))

    with torch._dynamo.config.patch(error_on_recompile=False):
        graph = capture(backend, forward, x, grid)
    assert block.recorded == "fast"
    block.fast = plain
    assert_follows(graph, forward, x)
