"""What is replaced for a capture is replaced for its thread only, and put back."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mmgraph.graphs import (
    CapturedGraph,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphBackend,
    capture_exact,
    select_backend,
)
from mmgraph.graphs.gc_freeze import undisturbed
from mmgraph.graphs.modes import BatchDescriptor, forward_context
from mmgraph.graphs.patch import ThreadPatch
from mmgraph.graphs.weak import weak_view

Function = Callable[..., Any]
collect, empty_cache = gc.collect, torch.cuda.empty_cache


def original(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What it says."""
    return ("original", args, kwargs)


def instead(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("instead", args, kwargs)


@pytest.fixture
def owner() -> Any:
    return types.SimpleNamespace(function=original)


@pytest.fixture
def patch(owner: Any) -> ThreadPatch:
    return ThreadPatch(owner, "function", instead)


def in_a_thread(function: Function) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_in_the_block_this_thread_gets_the_other_function(owner: Any, patch: ThreadPatch) -> None:
    with patch.applied():
        assert owner.function(1, key=2) == ("instead", (1,), {"key": 2})
        assert owner.function() == ("instead", (), {})
        assert owner.function.__doc__ == original.__doc__
    assert owner.function is original


def test_other_threads_get_the_original(owner: Any, patch: ThreadPatch) -> None:
    with patch.applied():
        assert in_a_thread(lambda: owner.function(1, key=2)) == ("original", (1,), {"key": 2})
        assert owner.function()[0] == "instead"


def test_blocks_can_be_nested(owner: Any, patch: ThreadPatch) -> None:
    with patch.applied():
        with patch.applied():
            assert owner.function()[0] == "instead"
        assert owner.function()[0] == "instead"
    assert owner.function is original


def test_a_block_can_be_entered_again(owner: Any, patch: ThreadPatch) -> None:
    for _ in range(3):
        with patch.applied():
            assert owner.function()[0] == "instead"
        assert owner.function is original


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_puts_the_function_back(
    error: type[BaseException], owner: Any, patch: ThreadPatch
) -> None:
    with pytest.raises(error), patch.applied(), patch.applied():
        raise error
    assert owner.function is original


def test_two_threads_can_be_inside_at_once_and_leave_in_any_order(
    owner: Any, patch: ThreadPatch
) -> None:
    entered, left = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        with patch.applied():
            entered.set()
            assert left.wait(30)
            seen.append(owner.function()[0])

    thread = threading.Thread(target=other)
    with patch.applied():
        thread.start()
        assert entered.wait(30)
    assert owner.function()[0] == "original"  # not ours any more, though it is still replaced
    assert owner.function is not original
    left.set()
    thread.join()
    assert seen == ["instead"]
    assert owner.function is original


def test_what_somebody_else_put_there_in_between_stays(owner: Any, patch: ThreadPatch) -> None:
    with patch.applied():
        below = owner.function

        def theirs(*args: Any) -> Any:
            return ("theirs", *below(*args))

        owner.function = theirs
        assert owner.function(1) == ("theirs", "instead", (1,), {})
    assert owner.function is theirs
    assert owner.function(1) == ("theirs", "original", (1,), {})
    with patch.applied():
        assert owner.function(1)[0] == "instead"
        assert in_a_thread(owner.function) == ("theirs", "original", (), {})
    assert owner.function is theirs


def test_what_somebody_else_put_there_and_took_away_again_is_no_matter(
    owner: Any, patch: ThreadPatch
) -> None:
    with patch.applied():
        below = owner.function
        owner.function = original
        assert owner.function()[0] == "original"
        owner.function = below
        assert owner.function()[0] == "instead"
    assert owner.function is original


class Node:
    """Garbage that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def cleans_up(seen: list[Any]) -> None:
    """As a compiler does that a forward may call."""
    node = weakref.ref(Node())
    seen.append(gc.collect(1))
    seen.append(gc.collect(generation=2))
    torch.cuda.empty_cache()
    seen.append(node() is not None)


def test_cleaning_up_does_nothing_while_undisturbed_and_works_afterwards() -> None:
    seen: list[Any] = []
    with undisturbed():
        cleans_up(seen)
        assert not gc.isenabled()
        assert in_a_thread(gc.collect) > 0  # another thread's calls are its own business
    assert seen == [0, 0, True]
    assert gc.isenabled()
    assert (gc.collect, torch.cuda.empty_cache) == (collect, empty_cache)
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_callable_that_cleans_up_can_be_captured(exact: bool, backend: GraphBackend) -> None:
    x, seen, collections = torch.rand(8, device="cuda"), list[Any](), list[str]()

    def forward(y: torch.Tensor) -> torch.Tensor:
        z = y.sin()
        collections.clear()
        gc.callbacks.append(count)
        cleans_up(seen)
        gc.callbacks.remove(count)
        return z * 2

    def count(phase: str, _: Any) -> None:
        collections.append(phase)

    def run(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [forward(buffers["x"])]

    graph: CapturedGraph
    if exact:
        graph = capture_exact(backend, run, {"x": x}, [])
    else:
        graph = backend.capture(run, {"x": x})
    assert seen[-3:] == [0, 0, True]
    assert collections == []  # of the last run, which is the one that is recorded
    x.uniform_()
    torch.testing.assert_close(graph.replay()[0], x.sin() * 2)
    assert (gc.collect, torch.cuda.empty_cache) == (collect, empty_cache)


@pytest.mark.gpu
def test_a_wrapper_of_a_callable_that_cleans_up_can_capture_it() -> None:
    x, seen = torch.rand(8, device="cuda"), list[Any]()

    def forward(y: torch.Tensor) -> torch.Tensor:
        cleans_up(seen)
        return y * 2

    backend = select_backend("auto", torch.device("cuda"))
    wrapper = CUDAGraphWrapper(forward, CUDAGraphMode.FULL, backend=backend)
    with forward_context(CUDAGraphMode.FULL, BatchDescriptor(8), capture_allowed=True):
        wrapper(x)
        x.uniform_()
        torch.testing.assert_close(wrapper(x), x * 2)
    assert gc.collect is collect


def test_on_the_cpu_a_weak_view_is_the_tensor() -> None:
    tensor = torch.rand(2, 3)
    assert weak_view(tensor) is tensor


@pytest.mark.gpu
def test_a_weak_view_is_the_same_memory_in_the_same_shape() -> None:
    base = torch.rand(6, 8, device="cuda")
    for tensor in (base, base[1:3, ::2], base.t(), base.to(torch.bfloat16)[:, 3]):
        view = weak_view(tensor)
        assert view is not tensor
        assert view.data_ptr() == tensor.data_ptr()
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        assert (view.dtype, view.device) == (tensor.dtype, tensor.device)
        assert torch.equal(view, tensor)
        tensor.fill_(3)
        assert torch.equal(view.clone(), torch.full_like(tensor, 3))
    empty = torch.empty(0, 4, device="cuda")
    assert weak_view(empty).shape == (0, 4)


@pytest.mark.gpu
def test_a_weak_view_keeps_no_memory() -> None:
    gc.collect()  # what earlier tests left must not go in between
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1 << 20, device="cuda")
    taken = torch.cuda.memory_allocated() - before
    view = weak_view(tensor)
    assert torch.cuda.memory_allocated() - before == taken >= 4 << 20
    del tensor
    assert torch.cuda.memory_allocated() == before
    del view
    assert torch.cuda.memory_allocated() == before
