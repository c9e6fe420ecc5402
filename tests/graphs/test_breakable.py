"""Breakable captures: segments around operations that stay eager, on the same memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
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
    break_at_modules,
    current_forward_context,
    eager_break,
    forward_context,
)
from mmgraph.recipes import load_recipe

BATCH = BatchDescriptor(4)
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(4, 8, device=device)


class Calls:
    """Counts the calls of an eager operation and of the Python around it."""

    def __init__(self) -> None:
        self.operation = self.model = 0


def model_with_a_host_read(calls: Calls) -> Function:
    """The operation chooses by a value that it reads on the host, which no graph can do."""

    @eager_break
    def choose(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        calls.operation += 1
        return y * 2 if float(y.sum()) > 0 else z - 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.model += 1
        kept = x.cos()  # made before the break, used after it
        chosen = choose(x.sin(), x + 1)
        return (chosen + kept).exp()

    return forward


def run(wrapper: Any, x: torch.Tensor, mode: CUDAGraphMode = PIECEWISE) -> torch.Tensor:
    with forward_context(mode, BATCH, capture_allowed=True):
        output: torch.Tensor = wrapper(x)
    return output


@torch.no_grad()
def test_an_operation_that_no_graph_can_hold_runs_between_segments(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    calls = Calls()
    forward = model_with_a_host_read(calls)
    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    torch.testing.assert_close(run(wrapper, x), forward(x))
    python = calls.model
    for sign in (1, -1, 1):  # the operation goes the one way, then the other
        x.copy_(torch.rand_like(x) * sign)
        before = calls.operation
        output = run(wrapper, x).clone()
        assert calls.operation == before + 1
        assert calls.model == python
        torch.testing.assert_close(output, forward(x))
        python = calls.model


@torch.no_grad()
def test_a_full_capture_of_it_is_refused_and_breaks_do_nothing_there(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    with pytest.raises(CaptureError):
        run(CUDAGraphWrapper(model_with_a_host_read(Calls()), FULL, backend=backend), x, FULL)
    harmless = eager_break(lambda y: y * 2)
    wrapper = CUDAGraphWrapper(lambda y: harmless(y.sin()), FULL, backend=backend)
    run(wrapper, x, FULL)
    x.normal_()
    torch.testing.assert_close(run(wrapper, x, FULL), x.sin() * 2)


@torch.no_grad()
def test_a_break_inside_a_break_runs_inline(backend: GraphBackend, x: torch.Tensor) -> None:
    inner = eager_break(lambda y: y + float(y.sum()))
    outer = eager_break(lambda y: inner(y * 2))
    wrapper = BreakableCUDAGraphWrapper(lambda y: outer(y.sin()).cos(), backend=backend)
    for _ in range(3):
        x.normal_()
        doubled = x.sin() * 2
        torch.testing.assert_close(run(wrapper, x), (doubled + doubled.sum()).cos())


@torch.no_grad()
def test_several_breaks_and_a_break_first_and_last(backend: GraphBackend, x: torch.Tensor) -> None:
    shift = eager_break(lambda y: y + float(y.max()))

    def forward(y: torch.Tensor) -> torch.Tensor:
        return shift(shift(y).sin() * 2)

    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(run(wrapper, x), forward(x))


@torch.no_grad()
def test_what_a_break_got_and_returned_outlives_other_captures(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    """Weak references there were reused memory elsewhere: another capture must not take it."""
    calls = Calls()
    forward = model_with_a_host_read(calls)
    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    run(wrapper, x)
    others = [CUDAGraphWrapper(lambda y, k=k: (y * k).tan(), FULL, backend=backend) for k in (2, 3)]
    for other in others:
        run(other, x, FULL)
    for _ in range(2):
        x.normal_()
        for other in others:
            run(other, x, FULL)
        torch.testing.assert_close(run(wrapper, x), forward(x))


@torch.no_grad()
def test_each_mode_is_served_by_its_own_wrapper(backend: GraphBackend, x: torch.Tensor) -> None:
    shift = eager_break(lambda y: y + 1)
    inner = BreakableCUDAGraphWrapper(lambda y: shift(y.sin()), PIECEWISE, backend=backend)
    outer = CUDAGraphWrapper(inner, FULL, backend=backend)
    for mode, captured, other in ((FULL, outer, inner), (PIECEWISE, inner, outer)):
        other.clear()
        for _ in range(2):
            x.normal_()
            torch.testing.assert_close(run(outer, x, mode), x.sin() + 1)
        assert captured.descriptors == [BATCH]
        assert other.descriptors == []


@torch.no_grad()
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_without_a_mode_of_its_own_it_serves_any_but_none(
    backend: GraphBackend, x: torch.Tensor, mode: CUDAGraphMode
) -> None:
    wrapper = BreakableCUDAGraphWrapper(torch.sin, backend=backend)
    run(wrapper, x, NONE)
    assert wrapper.descriptors == []
    torch.testing.assert_close(run(wrapper, x, mode), x.sin())
    assert wrapper.descriptors == [BATCH]


@torch.no_grad()
def test_inside_a_full_capture_a_wrapper_of_any_mode_just_calls(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    inner = BreakableCUDAGraphWrapper(torch.sin, backend=backend)
    outer = CUDAGraphWrapper(lambda y: inner(y) * 2, FULL, backend=backend)
    torch.testing.assert_close(run(outer, x, FULL), x.sin() * 2)
    assert inner.descriptors == []


def raise_in_a_segment(y: torch.Tensor) -> torch.Tensor:
    raise ValueError("in a segment")


@eager_break
def raise_in_a_break(y: torch.Tensor) -> torch.Tensor:
    raise ValueError("in a break")


def read_in_a_segment(y: torch.Tensor) -> torch.Tensor:
    return y * y.sum().item()


@pytest.mark.parametrize("fails", [raise_in_a_segment, raise_in_a_break, read_in_a_segment])
@torch.no_grad()
def test_a_failed_capture_leaves_nothing_open(
    backend: GraphBackend, x: torch.Tensor, fails: Function
) -> None:
    shift = eager_break(lambda y: y + 1)
    healthy = [True, True]  # the warm-ups pass, the capture fails

    def forward(y: torch.Tensor) -> torch.Tensor:
        y = shift(y.sin())
        return y * 2 if healthy and healthy.pop() else fails(y)

    warm_ups = 2 if x.is_cuda else 1
    del healthy[warm_ups:]
    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    with pytest.raises(CaptureError):
        run(wrapper, x)
    assert wrapper.descriptors == []
    assert current_forward_context() is None
    assert not backend.busy()
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    again = BreakableCUDAGraphWrapper(lambda y: shift(y.sin()), backend=backend)
    torch.testing.assert_close(run(again, x), x.sin() + 1)
    torch.testing.assert_close(shift(x), x + 1)


@torch.no_grad()
def test_an_error_in_a_replay_reaches_the_caller_and_the_next_replay_works(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    @eager_break
    def refuse_negative(y: torch.Tensor) -> torch.Tensor:
        if float(y.min()) < 0:
            raise ValueError("negative")
        return y + 1

    wrapper = BreakableCUDAGraphWrapper(lambda y: refuse_negative(y * 2), backend=backend)
    x.uniform_()
    run(wrapper, x)
    x.neg_()
    with pytest.raises(ValueError, match="negative"):
        run(wrapper, x)
    x.neg_()
    torch.testing.assert_close(run(wrapper, x), x * 2 + 1)


@torch.no_grad()
def test_a_break_that_returns_another_shape_is_a_clear_error(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    positive = eager_break(lambda y: y[y[:, 0] > 0])
    wrapper = BreakableCUDAGraphWrapper(lambda y: positive(y).sin(), backend=backend)
    x.uniform_(0.1, 1)
    run(wrapper, x)
    x[0] = -1
    with pytest.raises(ReplayError, match=r"returned \(3, 8\) of torch.float32, .* \(4, 8\)"):
        run(wrapper, x)


@torch.no_grad()
def test_threads_do_not_see_each_others_captures(backend: GraphBackend, x: torch.Tensor) -> None:
    """A break in another thread, while this one captures, is just called there."""
    shift = eager_break(lambda y: y + 1)
    seen: list[torch.Tensor] = []

    def elsewhere() -> None:
        with torch.no_grad():
            seen.append(shift(torch.ones(2)))

    def forward(y: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return shift(y.sin())

    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    run(wrapper, x)
    assert all(torch.equal(s, torch.full((2,), 2.0)) for s in seen)
    count = len(seen)
    x.normal_()
    torch.testing.assert_close(run(wrapper, x), x.sin() + 1)
    assert len(seen) == count


@pytest.mark.parametrize("family", ["clip", "qwen2_vl"])
@torch.no_grad()
def test_a_real_tower_broken_at_its_attention_equals_eager(
    backend: GraphBackend, device: str, family: str
) -> None:
    """The attention of a packed tower splits by lengths that it reads on the host."""
    tower = load_recipe(f"{family}:tiny").build_encoder(device=device)
    if family == "clip":
        breaks, inputs = ("encoder.layers.0.self_attn",), torch.randn(2, 3, 56, 56, device=device)
        call: dict[str, Any] = {"pixel_values": inputs}
    else:
        breaks = tuple(f"blocks.{i}.attn" for i in range(2))
        inputs = torch.randn(96, 1176, device=device)
        metadata = metadata_of(tower, device)
        call = {"hidden_states": inputs, **metadata}
    wrapper = BreakableCUDAGraphWrapper(tower, backend=backend)
    with break_at_modules(tower, breaks):
        for _ in range(2):
            inputs.normal_()
            with forward_context(PIECEWISE, BATCH, capture_allowed=True):
                output = wrapper(**call).last_hidden_state.clone()
            assert torch.equal(output, tower(**call).last_hidden_state)
    assert not any("forward" in module.__dict__ for module in tower.modules())


def metadata_of(tower: nn.Module, device: str) -> dict[str, torch.Tensor]:
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

    grid = torch.tensor([[1, 8, 4], [1, 8, 8]])
    return {
        "grid_thw": grid.to(device),
        "cu_seqlens": get_vision_cu_seqlens(grid).to(device),
        "position_ids": get_vision_position_ids(grid, tower.spatial_merge_size).to(device),
    }


def test_what_depends_on_data_in_a_segment_is_refused_and_in_a_break_is_not(
    backend: GraphBackend, x: torch.Tensor
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        return eager_break(lambda y: y[y > 0].sum())(x + 1) * 2

    with torch.no_grad(), forward_context(PIECEWISE, BATCH, capture_allowed=True):
        with pytest.raises(CaptureError, match="the shape of a result depends on data"):
            BreakableCUDAGraphWrapper(forward, backend=backend)(x)
        wrapper = BreakableCUDAGraphWrapper(broken, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(wrapper(x.normal_()), broken(x))


def test_a_backend_that_captures_whole_graphs_only_says_so() -> None:
    class Whole(GraphBackend):
        name = "whole"
        is_timed = False

        def capture(self, run: Any, buffers: Any, like: Any = None) -> Any: ...

        def synchronize(self) -> None: ...

        def settle(self) -> None: ...

        def use_pool(self, pool: Any | None) -> None: ...

        def ordered(self) -> Any:
            return nullcontext()

        def busy(self) -> bool:
            return False

    wrapper = BreakableCUDAGraphWrapper(torch.sin, backend=Whole())
    with (
        forward_context(PIECEWISE, BATCH, capture_allowed=True),
        pytest.raises(ConfigError, match="'whole' captures whole graphs only"),
    ):
        wrapper(torch.ones(2))


def test_breaking_at_a_module_that_is_not_there_is_a_clear_error() -> None:
    with (
        pytest.raises(ConfigError, match="no submodule 'attention'"),
        break_at_modules(nn.Linear(2, 2), ("attention",)),
    ):
        pytest.fail("there is nothing to break at")


def test_breaking_at_modules_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())

    def own(y: torch.Tensor) -> torch.Tensor:
        return y

    model[0].forward = own
    with pytest.raises(ValueError, match="x"), break_at_modules(model, ("0", "1")):
        raise ValueError("x")
    assert model[0].__dict__["forward"] is own
    assert "forward" not in model[1].__dict__
