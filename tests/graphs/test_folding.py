"""Graphs of exact calls: constants are computed once, contents are followed, host reads break."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.import_utils import is_cuda_stream_capturing

from mmgraph import CaptureError, ReplayError
from mmgraph.graphs import (
    BreakableGraph,
    GraphBackend,
    capture_exact,
    capture_folded,
    select_backend,
)
from mmgraph.graphs.operations import ReadsContents
from mmgraph.graphs.trees import tensors_in

Forward = Callable[[torch.Tensor], Any]
OnGrid = Callable[[torch.Tensor, torch.Tensor], Any]
GRID = [1, 2, 3]
is_capturing = torch.cuda.is_current_stream_capturing


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.rand(4, 8, device=device)


@pytest.fixture
def grid(device: str) -> torch.Tensor:
    return torch.tensor(GRID, device=device)


def capture(
    backend: GraphBackend,
    forward: Forward,
    x: torch.Tensor,
    constants: Iterable[torch.Tensor] = (),
) -> BreakableGraph:
    return capture_exact(backend, lambda b: tensors_in(forward(b["x"])), {"x": x}, constants)


@torch.no_grad()
def assert_follows(graph: BreakableGraph, forward: Forward, x: torch.Tensor) -> None:
    """Positive contents, negative ones, mixed ones, and the first kind again."""
    for low, high in ((0.1, 1), (-1, -0.1), (-1, 1), (0.1, 1)):
        x.uniform_(low, high)
        expected = tensors_in(forward(x.clone()))
        for output, value in zip(graph.replay(), expected, strict=True):
            torch.testing.assert_close(output, value)


def assert_nothing_is_patched(*modules: nn.Module) -> None:
    assert not any("forward" in part.__dict__ for m in modules for part in m.modules())
    assert torch.cuda.is_current_stream_capturing is is_capturing
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def three_rows(grid: torch.Tensor) -> torch.Tensor:
    """A mask of four rows."""
    return torch.arange(4, device=grid.device) != grid[1]


def reads_a_list(x: torch.Tensor, grid: torch.Tensor) -> Any:
    t, h, w = grid.tolist()
    return x[: t * h] * w


def reads_a_number(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x * int(grid.sum()) if bool((grid > 0).all()) else x


def reads_an_array(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x + float(np.asarray(grid.cpu()).sum())


def picks_rows_with_a_mask(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x[three_rows(grid)]


def picks_numbers_with_a_mask_and_a_table(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x[three_rows(grid), x[:3].argmax(dim=1)], x[three_rows(grid), grid]


def writes_rows_with_a_mask(x: torch.Tensor, grid: torch.Tensor) -> Any:
    y, mask = x.cos(), three_rows(grid)
    y[mask] = x[:3] * 2
    y[~mask] = 0
    return y


def fills_where_contents_say(x: torch.Tensor, grid: torch.Tensor) -> Any:
    y = x * 2
    y[x > 0.5] = 7
    return y


def picks_rows_with_positions_on_the_host(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x[torch.tensor([2, 0, 3])] * 2


def uploads_tables(x: torch.Tensor, grid: torch.Tensor) -> Any:
    row = [float(n) for n in range(8)]
    y = x + torch.tensor(row, device=x.device) + torch.tensor(data=row, device=x.device)
    return y * x.new_tensor(row) + torch.as_tensor(np.arange(8), device=x.device)


def uploads_an_array(x: torch.Tensor, grid: torch.Tensor) -> Any:
    table = torch.from_numpy(np.arange(8, dtype=np.float32))
    return x + table.to(x.device) * int(table[2])


def counts_positions(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return x[three_rows(grid).nonzero()[:, 0]] * torch.unique(grid).numel()


def repeats_rows(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return torch.repeat_interleave(x[:3], grid, dim=0)


def splits_by_sizes(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return [part * 2 for part in torch.split(x, grid[[0, 2]].tolist())], x.unbind(1)


def splits_a_table(x: torch.Tensor, grid: torch.Tensor) -> Any:
    first, second = torch.arange(8, device=x.device).chunk(2)
    return [x[:, :4] + first, x[:, 4:] + second, *grid.split([1, 2])]


def returns_constants(x: torch.Tensor, grid: torch.Tensor) -> Any:
    return [grid, x * 2, torch.arange(3, device=x.device), grid * 2]


def maps_over_a_table(x: torch.Tensor, grid: torch.Tensor) -> Any:
    """As masks are made in transformers: a function of positions, mapped over all of them."""
    places = torch.arange(8, device=x.device)
    near = torch.vmap(lambda i: torch.vmap(lambda j: (i - j).abs() < grid[0])(places))(places)
    return x.masked_fill(~near[: x.shape[0]], 0), torch.vmap(torch.sin)(x)


FOLDED = [
    maps_over_a_table,
    *(reads_a_list, reads_a_number, reads_an_array),
    *(picks_rows_with_a_mask, picks_numbers_with_a_mask_and_a_table, writes_rows_with_a_mask),
    *(fills_where_contents_say, picks_rows_with_positions_on_the_host),
    *(uploads_tables, uploads_an_array, counts_positions, repeats_rows, splits_by_sizes),
    *(splits_a_table, returns_constants),
]


@pytest.mark.parametrize("forward", FOLDED)
def test_what_depends_on_constants_only_is_no_part_of_the_graph(
    forward: OnGrid, backend: GraphBackend, x: torch.Tensor, grid: torch.Tensor
) -> None:
    graph = capture(backend, lambda y: forward(y, grid), x, [grid])
    assert graph.num_breaks == 0
    assert_follows(graph, lambda y: forward(y, grid), x)


def writes_contents_to_memory_of_constants(x: torch.Tensor, grid: torch.Tensor) -> Any:
    out = torch.zeros(5, 8, device=x.device)
    out[int(grid[0]) : 3] += x[:2]
    return out.sum(dim=0) + out


def writes_contents_beside_constants(x: torch.Tensor, grid: torch.Tensor) -> Any:
    out = torch.zeros(6, 8, dtype=torch.int64, device=x.device).to(x.dtype)
    out[0] = torch.arange(8, device=x.device)
    out[1] = 3
    out[2:] = x
    return out


def writes_through_a_view(x: torch.Tensor, grid: torch.Tensor) -> Any:
    out = torch.ones(2, 8, device=x.device)
    view = out.view(-1)[4:12]
    view.mul_(x[0])
    return out * 1


def changes_constants_in_use(x: torch.Tensor, grid: torch.Tensor) -> Any:
    table = torch.zeros(8, device=x.device)
    before = x + table
    table.add_(1)
    return before, x + table


def changes_constants_in_use_through_a_view(x: torch.Tensor, grid: torch.Tensor) -> Any:
    table = torch.zeros(2, 8, device=x.device)
    row = table[1]
    before = x + row
    table.add_(grid[1])
    after = x + row
    row.zero_()
    return before, after, x + table[0], x + table[1]


def changes_constants_before_use(x: torch.Tensor, grid: torch.Tensor) -> Any:
    table = torch.tensor([0.0] * 8, device=x.device)
    for step in grid.tolist():
        table[step:] += 1
    return x * table + float(table.sum())


def reads_constants_between_changes(x: torch.Tensor, grid: torch.Tensor) -> Any:
    table = torch.zeros(8, device=x.device)
    first = int(table.sum())
    table += 1
    y = x * table
    table += 1
    return y + first + int(table.sum()), x * table


WRITTEN = [
    *(writes_contents_to_memory_of_constants, writes_contents_beside_constants),
    *(writes_through_a_view, changes_constants_in_use, changes_constants_in_use_through_a_view),
    *(changes_constants_before_use, reads_constants_between_changes),
]


@pytest.mark.parametrize("forward", WRITTEN)
def test_memory_that_is_written_holds_what_it_should_in_each_replay(
    forward: OnGrid, backend: GraphBackend, x: torch.Tensor, grid: torch.Tensor
) -> None:
    graph = capture(backend, lambda y: forward(y, grid), x, [grid])
    assert graph.num_breaks == 0
    assert_follows(graph, lambda y: forward(y, grid), x)


def test_weights_changed_in_place_are_followed(
    backend: GraphBackend, x: torch.Tensor, grid: torch.Tensor
) -> None:
    layer = nn.Linear(8, 8, device=x.device)
    graph = capture(backend, lambda y: layer(y) * int(grid[1]), x, [grid])
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(1)
    assert_follows(graph, lambda y: layer(y) * int(grid[1]), x)


def test_random_numbers_are_new_in_each_replay(backend: GraphBackend, x: torch.Tensor) -> None:
    def forward(y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand_like(y), torch.rand(64, device=y.device), F.dropout(y + 100, 0.5)]

    graph = capture(backend, forward, x)
    first, second = ([t.clone() for t in graph.replay()] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert not torch.equal(a, b)
    for dropped in (first[2], second[2]):
        torch.testing.assert_close(dropped[dropped != 0], 2 * (x + 100)[dropped != 0])
        assert (dropped == 0).any()
    numbers = []
    for _ in range(2):
        torch.manual_seed(3)
        numbers.append(torch.rand(8, device=x.device))
    assert torch.equal(*numbers)


def test_what_the_graph_reads_lives_as_long_as_it_does(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    """Nobody else holds what was given, what was folded, and positions of masks."""
    kept_bytes = 0

    def make() -> BreakableGraph:
        nonlocal kept_bytes
        given, mask = torch.full((4, 8), 5.0, device=x.device), torch.tensor(GRID) > 1

        def forward(y: torch.Tensor) -> list[torch.Tensor]:
            table = torch.arange(8.0, device=y.device)
            return [y * given + table, y[:3][mask], torch.full((2,), 9.0, device=y.device)]

        kept_bytes = given.nbytes + 8 * 4 + 2 * 4 + 2 * 8
        return capture(backend, forward, x, [given, mask])

    graph = make()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in graph._kept}
    assert sum(held.values()) >= kept_bytes
    gc.collect()
    others = [torch.full((4 * 8,), float("nan"), device=x.device) for _ in range(64)]
    x.uniform_()
    sums, rows, nines = graph.replay()
    torch.testing.assert_close(sums, x * 5 + torch.arange(8.0, device=x.device))
    assert torch.equal(rows, x[1:3])
    assert torch.equal(nines, torch.full_like(nines, 9))
    assert all(bool(other.isnan().all()) for other in others)


def test_what_is_computed_on_the_way_is_not_kept(backend: GraphBackend, x: torch.Tensor) -> None:
    """All activations of a tower at once may not fit: the first run must not hold them."""
    alive: list[int] = []

    def forward(y: torch.Tensor) -> torch.Tensor:
        made = []
        for _ in range(10):
            y = y + 1
            made.append(weakref.ref(y))
        alive.append(sum(ref() is not None for ref in made))
        return y

    capture(backend, forward, x)
    warm_up, observed = alive[:2]
    assert (warm_up, observed) == (1, 1)


class Doubles(nn.Module):
    """Goes one way or the other by what it reads."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2 if float(y.sum()) > 0 else y - 1


class Around(nn.Module):
    """Calls an inner module between operations of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        z = y.sin()
        return self.inner(z) + z.cos()


class AroundAndReads(Around):
    """Reads contents itself as well."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return super().forward(y) * (3 if float(y.max()) > 0 else 5)


def test_a_submodule_that_reads_contents_becomes_a_break(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    tower = Around(Doubles())
    graph = capture(backend, tower, x)
    assert graph.num_breaks == 1
    assert_follows(graph, tower, x)
    assert_nothing_is_patched(tower)


def test_the_call_may_be_another_method_than_forward(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Doubles()

        def forward_features(self, y: torch.Tensor) -> torch.Tensor:
            return self.inner(y) + 1

    tower = Tower()
    graph = capture(backend, tower.forward_features, x)
    assert graph.num_breaks == 1
    assert_follows(graph, tower.forward_features, x)


def test_modules_around_the_capture_are_no_part_of_it(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    """A tower is called in the forward of its model, and that is where it is captured."""

    class Model(nn.Module):
        def forward(self, y: torch.Tensor) -> BreakableGraph:
            return capture(backend, Root(lists_contents), y)

    with pytest.raises(CaptureError, match="in Root, at tolist") as caught:
        Model()(x)
    assert isinstance(caught.value, ReadsContents)
    assert caught.value.module is None


def test_each_call_of_it_is_a_break(backend: GraphBackend, x: torch.Tensor) -> None:
    shared = Doubles()
    tower = Around(nn.Sequential(shared, Around(Doubles()), shared))
    graph = capture(backend, tower, x)
    assert graph.num_breaks == 3
    assert_follows(graph, tower, x)
    assert_nothing_is_patched(tower)


def test_a_break_inside_a_break_runs_inline(backend: GraphBackend, x: torch.Tensor) -> None:
    tower = Around(AroundAndReads(Doubles()))
    graph = capture(backend, tower, x)
    assert graph.num_breaks == 1
    assert_follows(graph, tower, x)
    assert_nothing_is_patched(tower)


def test_constants_are_folded_before_and_after_a_break(
    backend: GraphBackend, x: torch.Tensor, grid: torch.Tensor
) -> None:
    class Tower(Around):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            table = torch.arange(8, device=y.device) * int(grid[1])
            z = self.inner(y + table)
            table += int(grid[2])
            return z * table + torch.tensor([2.0], device=y.device)

    tower = Tower(Doubles())
    graph = capture(backend, tower, x, [grid])
    assert graph.num_breaks == 1
    assert_follows(graph, tower, x)


class AddsTo(nn.Module):
    """Writes to its second argument what it reads."""

    def forward(self, y: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += float(y.sum())
        return y * 2


class Scales(nn.Module):
    """Reads both arguments."""

    def forward(self, y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return y * float(y.sum()) + table


def test_what_a_break_writes_to_is_made_anew_in_each_replay(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    class Tower(Around):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            totals = torch.zeros(2, 8, device=y.device)
            return self.inner(y, totals[1]) + totals[1] + totals[0]

    tower = Tower(AddsTo())
    graph = capture(backend, tower, x)
    assert graph.num_breaks == 1
    assert_follows(graph, tower, x)


def test_a_break_finds_constants_as_they_were_at_that_moment(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    class Tower(Around):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            table = torch.zeros(8, device=y.device)
            z = self.inner(y, table)
            table += 1
            return z + table

    tower = Tower(Scales())
    assert_follows(capture(backend, tower, x), tower, x)


class HandsOn(nn.Module):
    """Returns what it got, or something new."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y if float(y.sum()) > 0 else y * 2


class Row(nn.Module):
    """Returns a part of what it got, always of the same shape."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y[0 if float(y.sum()) > 0 else 1]


class Weights(nn.Module):
    """Returns one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((8,), n)) for n in (1.0, 2.0))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.first if float(y.sum()) > 0 else self.second


@pytest.mark.parametrize("inner", [HandsOn, Row, Weights])
@torch.no_grad()
def test_nothing_is_copied_into_what_a_break_only_handed_on(
    inner: type[nn.Module], backend: GraphBackend, x: torch.Tensor
) -> None:
    """What it returned at capture is an argument or a weight that others read as well."""
    tower = Around(inner()).to(x.device)
    graph = capture(backend, tower, x.uniform_(0.1, 1))
    torch.testing.assert_close(graph.replay()[0], tower(x))
    before = [p.clone() for p in tower.parameters()]
    x.neg_()
    with pytest.raises(ReplayError, match=r"returned an argument or a weight .* a copy"):
        graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(tower.parameters(), before, strict=True))
    x.neg_()
    torch.testing.assert_close(graph.replay()[0], tower(x))


def reads_a_mask(y: torch.Tensor) -> torch.Tensor:
    return y[y > 0]


def counts_contents(y: torch.Tensor) -> torch.Tensor:
    return y.nonzero()


def lists_contents(y: torch.Tensor) -> torch.Tensor:
    return y * len(y.tolist())


def makes_a_tensor_of_contents(y: torch.Tensor) -> torch.Tensor:
    return y * torch.tensor([y.max() > 0.5, 1.0] * 4, device=y.device)


def makes_a_tensor_like_contents(y: torch.Tensor) -> torch.Tensor:
    return y + y.new_tensor([[y[0, 0], 1.0] * 4])


READS = [
    *(reads_a_mask, counts_contents, lists_contents),
    *(makes_a_tensor_of_contents, makes_a_tensor_like_contents),
]


class Root(nn.Module):
    """A tower that is one function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: torch.Tensor) -> Any:
        return self.function(y)


@pytest.mark.parametrize("reads", READS)
def test_a_read_of_contents_at_the_root_is_an_error_that_says_where(
    reads: Forward, backend: GraphBackend, x: torch.Tensor
) -> None:
    tower = Root(reads)
    with pytest.raises(CaptureError, match=r"it reads data on the host in Root, at "):
        capture(backend, tower, x)
    assert_nothing_is_patched(tower)
    again = capture(backend, torch.sin, x)
    assert_follows(again, torch.sin, x)


@pytest.mark.parametrize("reads", [lists_contents, makes_a_tensor_of_contents])
def test_the_same_read_in_a_submodule_is_a_break(
    reads: Forward, backend: GraphBackend, x: torch.Tensor
) -> None:
    tower = Around(Root(reads))
    graph = capture(backend, tower, x)
    assert graph.num_breaks == 1
    assert_follows(graph, tower, x)


def test_a_break_that_returns_another_shape_is_a_replay_error(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    tower = nn.Sequential(Root(reads_a_mask), nn.Tanh())
    graph = capture(backend, tower, x.uniform_(0.1, 1))
    x[0, 0] = -1
    with pytest.raises(ReplayError, match=r"returned \(31,\) of torch.float32, .* \(32,\)"):
        graph.replay()


@pytest.mark.parametrize("per_call", [1, -1], ids=["longer", "shorter"])
def test_two_runs_that_differ_are_an_error(
    per_call: int, backend: GraphBackend, x: torch.Tensor
) -> None:
    steps = [10]

    def forward(y: torch.Tensor) -> torch.Tensor:
        steps[0] += per_call
        for _ in range(steps[0]):
            y = y + 1
        return y

    tower = Root(forward)
    with pytest.raises(CaptureError, match="two runs of the same call differ"):
        capture(backend, tower, x)
    assert_nothing_is_patched(tower)
    assert_follows(capture(backend, torch.cos, x), torch.cos, x)


def test_a_table_that_is_made_once_and_kept_is_no_difference(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    class Tower(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(8.0, device=y.device).exp()
            return y * self.table

    tower = Tower()
    assert_follows(capture(backend, tower, x), tower, x)


@pytest.mark.parametrize("with_contents", [False, True])
def test_a_call_that_writes_to_a_given_constant_is_refused(
    with_contents: bool, backend: GraphBackend, x: torch.Tensor
) -> None:
    """The next replay would find what this one left."""
    given = torch.zeros(8, device=x.device)

    def forward(y: torch.Tensor) -> torch.Tensor:
        given.add_(y[0] if with_contents else 1)
        return y * given

    with pytest.raises(CaptureError, match="it writes to an argument"):
        capture(backend, forward, x, [given])


def test_an_error_of_the_call_is_a_capture_error_and_leaves_nothing_open(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    class Fails(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such kernel")

    tower = Around(nn.Sequential(Doubles(), Fails()))
    with pytest.raises(CaptureError, match="no such kernel"):
        capture(backend, tower, x)
    assert_nothing_is_patched(tower)


@pytest.mark.parametrize("reads", [False, True], ids=["reads-nothing", "reads"])
def test_what_reads_contents_in_eager_mode_goes_the_way_of_a_capture(
    backend: GraphBackend, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """transformers asks whether a stream captures; all runs that follow must go the same way."""
    if not x.is_cuda:  # nobody asks without a driver
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    original = torch.cuda.is_current_stream_capturing
    seen: list[bool] = []
    elsewhere: list[bool] = []

    def forward(y: torch.Tensor) -> torch.Tensor:
        seen.append(is_cuda_stream_capturing())
        ask = threading.Thread(target=lambda: elsewhere.append(is_cuda_stream_capturing()))
        ask.start()
        ask.join()
        if reads and not seen[-1] and bool((y == torch.inf).all()):
            return y
        return y * 2

    graph = capture(backend, forward, x)
    runs = 5 if x.is_cuda else 4  # as it comes, observed, one or two to warm up, recorded
    assert seen == ([False] * 2 + [True] * runs if reads else [False] * runs)
    assert not any(elsewhere)
    assert graph.num_breaks == 0
    assert_follows(graph, forward, x)
    assert torch.cuda.is_current_stream_capturing is original


def test_a_graph_made_in_inference_mode_serves_outside_it(
    backend: GraphBackend, x: torch.Tensor, grid: torch.Tensor
) -> None:
    tower = Around(nn.Sequential(Doubles(), Root(lambda y: y * torch.arange(8, device=y.device))))
    with torch.inference_mode():
        graph = capture(backend, tower, x)
    assert_follows(graph, tower, x)
    with torch.inference_mode():
        assert_follows(graph, tower, x)


def test_threads_capture_different_modules_at_once(device: str) -> None:
    """On the CPU each waits in each run of its module until the other is there too.

    On a GPU captures take turns, and the one that waited would wait for ever.
    """
    together = threading.Barrier(2)
    failures: list[BaseException] = []

    class Waits(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            if waiting:
                together.wait(timeout=60)
            return y * 2 if float(y.sum()) > 0 else y - 1

    def work(scale: float, x: torch.Tensor) -> None:
        try:
            tower = Around(nn.Sequential(Waits(), Root(lambda y: y * scale)))
            graph = capture(select_backend("auto", torch.device(device)), tower, x)
            made.append((graph, tower, x))
        except BaseException as error:
            together.abort()
            failures.append(error)

    waiting, made = device == "cpu", list[tuple[BreakableGraph, nn.Module, torch.Tensor]]()
    # torch draws no random numbers on a device while another thread's capture has its generator.
    inputs = [(scale, torch.rand(4, 8, device=device)) for scale in (2.0, 3.0)]
    threads = [threading.Thread(target=work, args=given) for given in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    waiting = False
    for graph, tower, x in made:
        assert graph.num_breaks == 1
        assert_follows(graph, tower, x)
        assert_nothing_is_patched(tower)


def test_threads_that_capture_the_same_module_leave_it_as_it_was(
    backend: GraphBackend, device: str
) -> None:
    class Slow(Doubles):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return super().forward(y)

    tower = Around(Slow())
    buffers = [torch.rand(4, 8, device=device) for _ in range(4)]
    graphs: dict[int, BreakableGraph] = {}

    def work(i: int) -> None:
        graphs[i] = capture(backend, tower, buffers[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_nothing_is_patched(tower)
    for i, x in enumerate(buffers):
        assert graphs[i].num_breaks == 1
        assert_follows(graphs[i], tower, x)


UPLOADS: dict[str, Forward] = {
    "positions": lambda x: x[:, torch.arange(8).flip(0)],
    "a table": lambda x: x + torch.arange(8.0).to(x.device),
    "numbers": lambda x: x * torch.tensor([2.0] * 8, device=x.device),
    "a number for positions": lambda x: assigned(x, torch.arange(3, device=x.device), 1.0),
    "a number for a mask": lambda x: assigned(x, x > 0, 1.0),
    "a size that is read": lambda x: x[:, : int(torch.tensor([3, 5]).to(x.device).max())],
}


@pytest.mark.parametrize("forward", UPLOADS.values(), ids=UPLOADS)
def test_a_graph_for_any_call_folds_what_no_call_changes(
    backend: GraphBackend, forward: Forward, x: torch.Tensor
) -> None:
    graph = capture_folded(backend, lambda b: tensors_in(forward(b["x"])), {"x": x})
    assert graph.num_breaks == 0
    assert_follows(graph, forward, x)
    graph.close()


def test_a_graph_for_any_call_has_no_breaks(backend: GraphBackend, x: torch.Tensor) -> None:
    reads = Reads()
    with pytest.raises(ReadsContents):
        capture_folded(backend, lambda b: tensors_in(reads(b["x"])), {"x": x})
    assert_nothing_is_patched(reads)


def assigned(x: torch.Tensor, index: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())
