"""The end: graphs go before weights and before the interpreter, whoever still holds what."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig, Reason
from mmgraph.attachment import lifetime
from mmgraph.recipes import load_recipe

# Compilers keep what they have seen; here it is ours that has to go.
CONFIG = GraphConfig(row_budgets=(1, 2, 4), compile_blocks=False)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def only_what_the_test_attaches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lifetime, "_live", weakref.WeakSet())
    yield
    mmgraph.shutdown()


def clip(device: str = "cpu") -> Any:
    return load_recipe("clip:tiny").build_model(device=device)


def pixels(rows: int, device: str) -> torch.Tensor:
    return torch.randn(rows, 3, 56, 56, device=device)


def graphs_of(handle: mmgraph.Handle) -> list[Any]:
    managers = [m.manager for m in handle._methods if m.manager is not None]
    return [entry.graph for manager in managers for entry in manager._store.entries.values()]


def assert_closed(graphs: list[Any]) -> None:
    assert graphs
    for graph in graphs:
        with pytest.raises(AssertionError, match="closed"):
            graph.replay()


@torch.no_grad()
def test_a_shut_down_handle_has_no_graphs_backends_or_wrapped_methods(device: str) -> None:
    model, inputs = clip(device), pixels(2, device)
    expected = model(inputs).last_hidden_state
    handle = mmgraph.attach(model, CONFIG)
    model(inputs)
    graphs, backends = graphs_of(handle), [weakref.ref(b) for b in handle._backends.values()]
    handle.shutdown()
    handle.shutdown()
    assert_closed(graphs)
    gc.collect()
    assert [backend() for backend in backends] == [None]
    assert "forward" not in model.__dict__
    assert torch.equal(model(inputs).last_hidden_state, expected)
    assert handle.stats().hits == 2  # counters are kept
    assert handle.stats().graphs == ()
    assert not handle.is_captured()
    handle.detach()


@torch.no_grad()
def test_whoever_still_calls_what_was_wrapped_gets_eager_mode(device: str) -> None:
    model, inputs = clip(device), pixels(2, device)
    handle = mmgraph.attach(model, CONFIG)
    expected = model(inputs).last_hidden_state
    wrapped, manager = model.forward, handle._methods[0].manager
    assert manager is not None
    handle.shutdown()
    torch.testing.assert_close(wrapped(inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    assert handle.stats().misses == {Reason.DETACHED: 2}
    manager.run({"pixel_values": inputs})  # a thread that was on its way
    assert manager.stats().graphs == ()


@torch.no_grad()
def test_a_model_can_be_attached_again_and_the_first_handle_leaves_it_alone(device: str) -> None:
    model, inputs = clip(device), pixels(2, device)
    first = mmgraph.attach(model, CONFIG)
    first.shutdown()
    with mmgraph.attach(model, CONFIG) as second:
        first.shutdown()
        model(inputs)
        assert second.stats().hits == 2


@torch.no_grad()
def test_shutdown_closes_every_handle_that_lives(device: str) -> None:
    models, inputs = [clip(device), clip(device)], pixels(1, device)
    handles = [mmgraph.attach(model, CONFIG) for model in models]
    for model in models:
        model(inputs)
    graphs = [graph for handle in handles for graph in graphs_of(handle)]
    mmgraph.shutdown()
    mmgraph.shutdown()
    assert_closed(graphs)
    assert all("forward" not in model.__dict__ for model in models)


@torch.no_grad()
def test_shutdown_closes_a_model_whose_handle_was_dropped(device: str) -> None:
    model, inputs = clip(device), pixels(1, device)
    graphs_before = graphs_of(mmgraph.attach(model, CONFIG))
    model(inputs)
    method = model.__dict__["forward"]
    graphs = [entry.graph for entry in method.manager._store.entries.values()]
    gc.collect()
    assert len(lifetime._live) == 1  # the method; its handle is gone
    mmgraph.shutdown()
    assert graphs_before == []
    assert_closed(graphs)
    assert "forward" not in model.__dict__


def test_a_model_that_is_dropped_is_not_kept() -> None:
    model = clip()
    handle = mmgraph.attach(model, CONFIG)
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
    assert len(lifetime._live) == 0


def test_one_that_fails_does_not_keep_the_others() -> None:
    class Failing:
        calls = 0

        def shutdown(self) -> None:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("no such thing")

    failing, models = [Failing(), Failing()], [clip(), clip()]
    lifetime.register(failing[0])
    for model in models:
        mmgraph.attach(model, CONFIG)
    lifetime.register(failing[1])
    with pytest.raises(ValueError, match="no such thing"):
        mmgraph.shutdown()
    assert all("forward" not in model.__dict__ for model in models)
    assert [f.calls for f in failing] == [1, 1]


SCRIPT = """
import atexit, os, sys
import torch
import mmgraph
from mmgraph.graphs.trace import TracedGraph
from mmgraph.recipes import load_recipe

ours, register = [], atexit.register
register(print, "the end", flush=True)

def registering(function, *args, **kwargs):
    ours.extend(function.__name__ for _ in [0] if function.__module__.startswith("mmgraph"))
    return register(function, *args, **kwargs)

atexit.register = registering
torch.set_num_threads(1)
model = load_recipe("clip:tiny").build_model()
mmgraph.attach, mmgraph.shutdown
assert ours == []
mmgraph.attach(model, mmgraph.GraphConfig(row_budgets=(1,)))
mmgraph.attach(load_recipe("clip:tiny").build_model())
assert ours == ["_at_exit"]
with torch.no_grad():
    model(torch.ones(1, 3, 56, 56))
close = TracedGraph.close

def closing(self):
    print("graph", os.getpid() == parent, bool(model.__dict__), flush=True)
    close(self)

parent = os.getpid()
TracedGraph.close = closing
if sys.argv[1] == "fork" and os.fork() == 0:
    sys.exit()
elif sys.argv[1] == "fork":
    os.wait()
    print("waited", flush=True)
"""


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("plain", ["graph True True", "the end"]),
        ("fork", ["the end", "waited", "graph True True", "the end"]),
    ],
)
def test_the_end_of_the_interpreter_closes_graphs_first_and_only_its_own(
    argument: str, expected: list[str]
) -> None:
    command = [sys.executable, "-c", SCRIPT, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == expected
