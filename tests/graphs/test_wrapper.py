"""CUDAGraphWrapper: eager unless the context asks for its mode, then one graph a descriptor."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import CaptureError, ConfigError, ReplayError
from mmgraph.graphs import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphBackend,
    forward_context,
)

BATCH, OTHER = BatchDescriptor(4), BatchDescriptor(8)
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Model(nn.Module):
    """Counts the runs of its Python, and returns a structure with a constant in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor, *, scales: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.runs += 1
        y = self.linear(x) * scales["one"]
        return {"y": y, "sum": [y.sum(dim=0)], "note": "constant"}


@pytest.fixture
def model(device: str) -> Model:
    return Model().to(device).requires_grad_(False)


def call(device: str, rows: int = 4) -> dict[str, Any]:
    scale = torch.rand(1, device=device)
    return {"x": torch.randn(rows, 8, device=device), "scales": {"one": scale}}


def assert_equal(output: dict[str, Any], expected: dict[str, Any]) -> None:
    assert output.keys() == expected.keys()
    assert output["note"] == "constant"
    torch.testing.assert_close(output["y"], expected["y"])
    torch.testing.assert_close(output["sum"], expected["sum"])


@pytest.mark.parametrize("mode", [None, NONE, PIECEWISE])
def test_in_any_other_mode_it_calls_the_runnable(
    model: Model, backend: GraphBackend, device: str, mode: CUDAGraphMode | None
) -> None:
    wrapper, inputs = CUDAGraphWrapper(model, FULL, backend=backend), call(device)
    expected = model(**inputs)
    if mode is None:
        assert_equal(wrapper(**inputs), expected)
    else:
        with forward_context(mode, BATCH, capture_allowed=True):
            assert_equal(wrapper(**inputs), expected)
    assert model.runs == 2
    assert wrapper.descriptors == []


def test_it_captures_once_a_descriptor_and_then_replays(
    model: Model, backend: GraphBackend, device: str
) -> None:
    wrapper = CUDAGraphWrapper(model, FULL, backend=backend)
    batches = {BATCH: call(device, 4), OTHER: call(device, 8)}
    for descriptor, inputs in batches.items():
        with forward_context(FULL, descriptor, capture_allowed=True):
            assert_equal(wrapper(**inputs), model(**inputs))
    runs = model.runs
    for _ in range(2):
        for descriptor, inputs in batches.items():
            inputs["x"].normal_()
            inputs["scales"]["one"].uniform_()
            with forward_context(FULL, descriptor):
                output = wrapper(**inputs)
            assert model.runs == runs
            assert_equal(output, model(**inputs))
            runs = model.runs
    assert wrapper.descriptors == [BATCH, OTHER]


def test_threads_that_ask_for_one_graph_get_one(
    model: Model, backend: GraphBackend, device: str
) -> None:
    """Those that ask for others capture one after the other."""
    wrappers = [CUDAGraphWrapper(model, FULL, backend=backend) for _ in range(2)]
    inputs = call(device)
    expected, start = model(**inputs), threading.Barrier(6)
    opened: list[int] = []

    def ask(number: int) -> None:
        start.wait(10)
        with forward_context(FULL, BATCH, capture_allowed=True) as context, backend.ordered():
            assert_equal(wrappers[number % 2](**inputs), expected)
            opened.append(context.log.num_captured)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert sum(opened) == 2
    assert [wrapper.descriptors for wrapper in wrappers] == [[BATCH]] * 2


def test_a_capture_that_is_not_allowed_is_a_clear_error(
    model: Model, backend: GraphBackend, device: str
) -> None:
    wrapper = CUDAGraphWrapper(model, FULL, backend=backend)
    with (
        forward_context(FULL, BATCH),
        pytest.raises(CaptureError, match=r"no FULL graph for BatchDescriptor\(num_tokens=4.*"),
    ):
        wrapper(**call(device))
    assert model.runs == 0


def test_a_failed_capture_leaves_no_graph_and_the_next_works(
    model: Model, backend: GraphBackend, device: str
) -> None:
    wrapper, inputs = CUDAGraphWrapper(model, FULL, backend=backend), call(device)
    with forward_context(FULL, BATCH, capture_allowed=True):
        with pytest.raises(CaptureError):
            wrapper(x=inputs["x"][:, :3], scales=inputs["scales"])  # eight columns are wanted
        assert wrapper.descriptors == []
        assert_equal(wrapper(**inputs), model(**inputs))


@pytest.mark.parametrize(
    ("moved", "name"),
    [("x", r"kwargs\['x'\]"), ("one", r"kwargs\['scales'\]\['one'\]")],
)
def test_debug_mode_names_the_tensor_that_moved(
    model: Model,
    backend: GraphBackend,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    moved: str,
    name: str,
) -> None:
    monkeypatch.setenv("MMGRAPH_DEBUG", "1")
    wrapper, inputs = CUDAGraphWrapper(model, FULL, backend=backend), call(device)
    with forward_context(FULL, BATCH, capture_allowed=True):
        wrapper(**inputs)
        wrapper(**inputs)
        place = inputs if moved == "x" else inputs["scales"]
        place[moved] = place[moved].clone()
        with pytest.raises(ReplayError, match=f"the tensor {name} was captured at 0x"):
            wrapper(**inputs)


def test_debug_mode_names_a_positional_tensor(
    backend: GraphBackend, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMGRAPH_DEBUG", "1")
    wrapper = CUDAGraphWrapper(lambda pair: pair[0] + pair[1], FULL, backend=backend)
    pair = [torch.ones(2, device=device), torch.ones(2, device=device)]
    with forward_context(FULL, BATCH, capture_allowed=True):
        wrapper(pair)
        pair[1] = pair[1].clone()
        with pytest.raises(ReplayError, match=r"the tensor args\[0\]\[1\] was captured"):
            wrapper(pair)


def test_nested_wrappers_each_have_their_mode(
    model: Model, backend: GraphBackend, device: str
) -> None:
    inner = CUDAGraphWrapper(model, PIECEWISE, backend=backend)
    outer, inputs = CUDAGraphWrapper(inner, FULL, backend=backend), call(device)
    for mode, captured in ((FULL, outer), (PIECEWISE, inner)):
        with forward_context(mode, BATCH, capture_allowed=True):
            assert_equal(outer(**inputs), model(**inputs))
        assert captured.descriptors == [BATCH]
    assert outer.unwrap() is model
    assert inner.unwrap() is model


def test_a_mode_that_is_raised_later_finds_its_wrapper_installed(
    model: Model, backend: GraphBackend, device: str
) -> None:
    """Both are there from the start; the context alone decides, forward by forward."""
    inner = BreakableCUDAGraphWrapper(model, PIECEWISE, backend=backend)
    outer, inputs = CUDAGraphWrapper(inner, FULL, backend=backend), call(device)

    def dispatch(setting: CUDAGraphMode) -> None:
        modes = {FULL: setting.has_full_cudagraphs(), PIECEWISE: setting.has_piecewise_cudagraphs()}
        for mode, is_wanted in modes.items():
            with forward_context(mode if is_wanted else NONE, BATCH, capture_allowed=True):
                assert_equal(outer(**inputs), model(**inputs))

    dispatch(FULL)
    assert (outer.descriptors, inner.descriptors) == ([BATCH], [])
    dispatch(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert (outer.descriptors, inner.descriptors) == ([BATCH], [BATCH])


def test_a_draft_that_is_dispatched_in_pieces_is_captured_beside_a_full_target(
    model: Model, backend: GraphBackend, device: str
) -> None:
    draft = BreakableCUDAGraphWrapper(model, backend=backend)
    target, inputs = CUDAGraphWrapper(model, FULL, backend=backend), call(device)
    with forward_context(FULL, BATCH, capture_allowed=True):
        assert_equal(target(**inputs), model(**inputs))
        with forward_context(PIECEWISE, BATCH, capture_allowed=True):
            assert_equal(draft(**inputs), model(**inputs))
    assert target.descriptors == draft.descriptors == [BATCH]
    runs = model.runs
    with forward_context(FULL, BATCH):
        target(**inputs)
        with forward_context(PIECEWISE, BATCH):
            draft(**inputs)
    assert model.runs == runs


def test_tensors_in_something_unknown_are_a_clear_error(backend: GraphBackend, device: str) -> None:
    class Output:
        def __init__(self, hidden: torch.Tensor) -> None:
            self.hidden = hidden

    wrapper = CUDAGraphWrapper(lambda x: Output(x * 2), FULL, backend=backend)
    with (
        forward_context(FULL, BATCH, capture_allowed=True),
        pytest.raises(CaptureError, match="tensors in a Output can't be followed"),
    ):
        wrapper(torch.ones(2, device=device))
    assert wrapper.descriptors == []


def test_unwrap_is_not_fooled_by_a_foreign_object(backend: GraphBackend) -> None:
    class Foreign:
        runnable = "something else"

        def unwrap(self) -> None:
            pytest.fail("this is none of ours")

        def __call__(self) -> None: ...

    foreign = Foreign()
    assert CUDAGraphWrapper(foreign, FULL, backend=backend).unwrap() is foreign


def test_attributes_are_those_of_the_runnable(model: Model, backend: GraphBackend) -> None:
    wrapper = CUDAGraphWrapper(model, FULL, backend=backend)
    assert wrapper.linear is model.linear
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapper.no_such


@pytest.mark.parametrize("mode", [NONE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_wrapper_has_a_mode_that_captures(mode: CUDAGraphMode, backend: GraphBackend) -> None:
    with pytest.raises(ConfigError, match=f"must be FULL or PIECEWISE, got {mode.name}"):
        CUDAGraphWrapper(lambda: None, mode, backend=backend)


def test_clear_frees_the_graphs_and_they_come_back(
    model: Model, backend: GraphBackend, device: str
) -> None:
    wrapper, inputs = CUDAGraphWrapper(model, FULL, backend=backend), call(device)
    for _ in range(2):
        with forward_context(FULL, BATCH, capture_allowed=True):
            assert_equal(wrapper(**inputs), model(**inputs))
        assert wrapper.descriptors == [BATCH]
        wrapper.clear()
        assert wrapper.descriptors == []
