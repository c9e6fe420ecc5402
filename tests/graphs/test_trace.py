"""The trace backend keeps the rules of a CUDA graph on a machine without one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from mmgraph import CaptureError
from mmgraph.graphs.trace import TraceBackend

Buffers = Mapping[str, torch.Tensor]


class Net(nn.Module):
    """A layer with parameters, a registered buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.table = torch.randn(8, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x) + self.shift) + self.table[index]

    def run(self, buffers: Buffers) -> list[torch.Tensor]:
        return [self(buffers["x"], buffers["index"])]


@pytest.fixture
def backend() -> TraceBackend:
    return TraceBackend()


@pytest.fixture
def buffers() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 4), "index": torch.arange(6)}


def capture_one(
    backend: TraceBackend, function: Callable[[torch.Tensor], Any], x: torch.Tensor
) -> None:
    with torch.no_grad():
        backend.capture(lambda buffers: [function(buffers["x"])], {"x": x})


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))
    yield from module.parameters()
    yield from module.buffers()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_replay_is_the_call_on_what_the_buffers_hold_now(
    backend: TraceBackend, buffers: dict[str, torch.Tensor], mode: type
) -> None:
    net = Net()
    with mode():
        graph = backend.capture(net.run, buffers)
    for _ in range(3):
        buffers["x"].normal_()
        buffers["index"].random_(8)
        with torch.no_grad():
            expected = net.run(buffers)[0]
        with mode():
            (output,) = graph.replay()
        assert torch.equal(output, expected)
        assert not output.requires_grad


def test_a_replay_runs_no_python_of_the_callable(
    backend: TraceBackend, buffers: dict[str, torch.Tensor]
) -> None:
    calls: list[int] = []

    def run(views: Buffers) -> list[torch.Tensor]:
        calls.append(1)
        return [views["x"] + 1]

    graph = backend.capture(run, buffers)
    captured = len(calls)
    graph.replay()
    assert len(calls) == captured


def test_several_outputs_come_back_in_order(
    backend: TraceBackend, buffers: dict[str, torch.Tensor]
) -> None:
    graph = backend.capture(lambda b: [b["x"] * 2, b["index"] + 1, b["x"].sum()], buffers)
    double, after, total = graph.replay()
    assert torch.equal(double, buffers["x"] * 2)
    assert torch.equal(after, buffers["index"] + 1)
    assert torch.equal(total, buffers["x"].sum())


def test_weights_changed_in_place_are_followed(
    backend: TraceBackend, buffers: dict[str, torch.Tensor]
) -> None:
    net = Net()
    graph = backend.capture(net.run, buffers)
    before = graph.replay()[0].clone()
    with torch.no_grad():
        net.linear.weight.mul_(2)
        net.linear.bias.add_(1)
        net.shift.neg_()
        net.table.zero_()
        expected = net.run(buffers)[0]
    (output,) = graph.replay()
    assert torch.equal(output, expected)
    assert not torch.allclose(output, before)


def assign_by_mask(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 0] = torch.ones(int((x > 0).sum()))
    return y


HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * x[0, 0].item(),
    "tolist": lambda x: x * x.tolist()[0][0],
    "float": lambda x: x * float(x.sum()),
    "numpy": lambda x: x * float(x.numpy()[0, 0]),
    "if": lambda x: x if x.sum() > 0 else -x,
    "bool": lambda x: x if bool((x > 0).all()) else -x,
    "equal": lambda x: x if torch.equal(x, x) else -x,
    "allclose": lambda x: x if torch.allclose(x, x) else -x,
    "select by mask": lambda x: x[x > 0],
    "select by a mask of weights": lambda x: x[:, torch.ones(4) > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "assign by mask": assign_by_mask,
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), dim=0),
    "slice": lambda x: x[: (x[:, 0] > 0).sum()],
    "split": lambda x: torch.split(x, (x[:2, 0] * 0 + 3).long().tolist())[0],
    "detached": lambda x: x * float(x.detach()[0, 0]),
}


@pytest.mark.parametrize("name", HOST_READS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_host_read_of_data_is_an_error(backend: TraceBackend, name: str, mode: type) -> None:
    with mode(), pytest.raises(CaptureError, match=r"reads tensor data|can't be recorded"):
        backend.capture(lambda b: [HOST_READS[name](b["x"])], {"x": torch.randn(6, 4)})


@pytest.mark.parametrize("read", [torch.Tensor.item, float, bool])
def test_a_host_read_of_a_weight_is_an_error(
    backend: TraceBackend, read: Callable[[torch.Tensor], float]
) -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(CaptureError):
        capture_one(backend, lambda x: x * read(scale), torch.randn(6, 4))


STATIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shapes": lambda x: x * x.shape[0] * len(x),
    "rows": lambda x: torch.stack([row * i for i, row in enumerate(x)]),
    "fill by mask": lambda x: x.masked_fill(x > 0, 0.0),
    "choose by mask": lambda x: torch.where(x > 0, x, -x),
    "constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "constant repeats": lambda x: x.repeat_interleave(2, dim=0),
    "own memory": lambda x: x.clone().add_(1).mul_(x),
    "the buffer itself": lambda x: x,
    "a view of the buffer": lambda x: x[1:3].t(),
}


@pytest.mark.parametrize("name", STATIC)
def test_what_a_graph_can_hold_is_recorded(backend: TraceBackend, name: str) -> None:
    x = torch.randn(6, 4)
    graph = backend.capture(lambda b: [STATIC[name](b["x"])], {"x": x})
    x.normal_()
    assert torch.equal(graph.replay()[0], STATIC[name](x))


def test_an_error_of_the_callable_is_a_capture_error_that_names_it(backend: TraceBackend) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer\nsecond line")

    with pytest.raises(CaptureError, match=r"^the call can't be recorded: KeyError: 'no such"):
        capture_one(backend, fail, torch.randn(6, 4))


def test_a_failed_capture_harms_neither_the_next_nor_an_older_one(backend: TraceBackend) -> None:
    net, x = nn.Linear(4, 4), torch.randn(6, 4)
    older = backend.capture(lambda b: [net(b["x"])], {"x": x})
    with pytest.raises(CaptureError):
        capture_one(backend, lambda x: net(x) * net(x).sum().item(), x)
    newer = backend.capture(lambda b: [net(b["x"])], {"x": x})
    x.normal_()
    with torch.no_grad():
        expected = net(x)
    assert torch.equal(older.replay()[0], expected)
    assert torch.equal(newer.replay()[0], expected)


def test_an_interrupt_is_no_capture_error(backend: TraceBackend) -> None:
    def interrupt(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_one(backend, interrupt, torch.randn(6, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_the_callable_keeps_is_left_fake(
    backend: TraceBackend, buffers: dict[str, torch.Tensor], fails: bool
) -> None:
    net = Net()

    @functools.lru_cache(maxsize=1)
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32)

    def run(views: Buffers) -> list[torch.Tensor]:
        if not hasattr(net, "cached"):
            net.cached = torch.arange(4.0) + net.shift
        output = net.run(views)[0] + positions(4) + net.cached
        return [output * float(output.sum())] if fails else [output]

    if fails:
        with pytest.raises(CaptureError):
            backend.capture(run, buffers)
    else:
        graph = backend.capture(run, buffers)
        assert not any(isinstance(t, FakeTensor) for t in graph.replay())
    kept = [*tensors_of(net), positions(4), net.cached, *buffers.values()]
    assert not any(isinstance(tensor, FakeTensor) for tensor in kept)
    assert torch.equal(positions(4), torch.arange(4.0))
    assert torch.isfinite(net.run(buffers)[0]).all()


def test_capturing_changes_no_buffer_weight_or_random_number(
    backend: TraceBackend, buffers: dict[str, torch.Tensor]
) -> None:
    net = Net()
    kept = [*tensors_of(net), *buffers.values()]
    before, state = [t.detach().clone() for t in kept], torch.get_rng_state()
    backend.capture(net.run, buffers)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_recording_is_made_without_gradients(backend: TraceBackend) -> None:
    net = nn.Linear(4, 4)
    graph = backend.capture(lambda b: [net(b["x"])], {"x": torch.randn(6, 4)})
    assert torch.is_grad_enabled()
    assert not graph.replay()[0].requires_grad


def test_a_closed_graph_lets_go_and_can_be_closed_again(
    backend: TraceBackend, buffers: dict[str, torch.Tensor]
) -> None:
    graph, other = (backend.capture(lambda b: [b["x"] + 1], buffers) for _ in range(2))
    graph.close()
    graph.close()
    with pytest.raises(AssertionError, match="closed"):
        graph.replay()
    assert torch.equal(other.replay()[0], buffers["x"] + 1)


def test_the_backend_is_never_busy_and_takes_any_pool(backend: TraceBackend) -> None:
    backend.use_pool(None)
    backend.use_pool((0, 1))
    assert not backend.busy()


def test_ordered_blocks_run_one_at_a_time(backend: TraceBackend) -> None:
    entered, inside, overlaps = threading.Event(), [], []

    def work() -> None:
        entered.set()
        with backend.ordered():
            overlaps.extend(inside)

    thread = threading.Thread(target=work)
    with backend.ordered(), backend.ordered():  # one thread may nest them
        inside.append("first")
        thread.start()
        entered.wait()
        thread.join(0.05)
        assert thread.is_alive()
        inside.clear()
    thread.join()
    assert overlaps == []


def test_an_ordered_block_is_left_after_an_error(backend: TraceBackend) -> None:
    with pytest.raises(ValueError, match="x"), backend.ordered():
        raise ValueError("x")
    thread = threading.Thread(target=lambda: backend.ordered().__enter__())
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
