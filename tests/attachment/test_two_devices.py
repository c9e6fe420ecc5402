"""Towers that aren't on the current device, on two devices, or in parts: graphs, or eager mode.

Each test runs on two GPUs, and where it says something there also with the CPU in the place of
both, as most of what can go wrong in the tests themselves shows there too.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

import mmgraph
from mmgraph import GraphConfig, Handle, Reason
from mmgraph.encoders import eager_towers, encoder_for, find_towers
from mmgraph.preparation import find_blocks
from mmgraph.recipes import load_recipe
from tests.contract.cases import error, tensors

TWO_GPUS = (pytest.mark.gpu, pytest.mark.multi_gpu)
PLACES = [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=TWO_GPUS)]
NAMES = ["vit:tiny", "qwen2_5_vl:tiny"]  # of the layouts rows and packed
CONFIG = GraphConfig(
    token_budgets=(64, 128), row_budgets=(1, 2, 4), max_items=4, compile_blocks=False
)
PIECEWISE = GraphConfig(mode="piecewise", compile_blocks=False)
Call = dict[str, Any]


@pytest.fixture(params=PLACES, ids=["cpu", "gpus"])
def places(request: pytest.FixtureRequest) -> tuple[torch.device, torch.device]:
    """The current device and another one."""
    first, second = request.param
    return torch.device(first), torch.device(second)


@pytest.fixture
def first(places: tuple[torch.device, torch.device]) -> torch.device:
    return places[0]


@pytest.fixture
def second(places: tuple[torch.device, torch.device]) -> torch.device:
    return places[1]


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    return load_recipe(name).build_encoder(device=device, dtype=dtype)


def calls_of(tower: nn.Module, device: torch.device, count: int = 2) -> list[Call]:
    """Calls of the same sizes with other contents; grids are on the CPU."""
    (found,) = find_towers(tower)
    example = encoder_for(found).example_call()
    generator = torch.Generator().manual_seed(0)

    def contents(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        return torch.randn(value.shape, generator=generator).to(device, value.dtype)

    return [{name: contents(v) for name, v in example.items()} for _ in range(count)]


def moved(call: Call, device: torch.device) -> Call:
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}


def in_eager_mode(tower: nn.Module, call: Call) -> list[torch.Tensor]:
    """What the tower gives without graphs; it wants its grids on its own device."""
    with eager_towers():
        return tensors(tower(**moved(call, next(tower.parameters()).device)))


def assert_equal(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
    """Types, shapes and devices are the same, and values within the bounds of the other tests."""
    assert len(ours) == len(eager) > 0
    for a, b in zip(ours, eager, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        limit = 0.05 if b.dtype is torch.bfloat16 else 1e-4 if b.is_cuda else 1e-5
        assert error(a, b) <= limit


def assert_right(tower: nn.Module, calls: Sequence[Call]) -> None:
    """Each answer is what eager mode gives now, and is no other call's."""
    answers = []
    for call in calls:
        ours = tensors(tower(**call))
        assert_equal(ours, in_eager_mode(tower, call))
        answers.append(ours[0])
    for other in answers[1:]:
        assert not torch.allclose(other, answers[0], rtol=0.05, atol=0.05)


def assert_all_replayed(handle: Handle) -> None:
    stats = handle.stats()
    assert stats.misses == {}
    assert stats.hits == stats.items > 0
    assert sum(graph.replays for graph in stats.graphs) > 0


@contextmanager
def nothing_on(device: torch.device, other: torch.device) -> Iterator[None]:
    """Within the block nothing is allocated on `device`, and the current device is as before."""
    if device == other:
        yield
        return
    gc.collect()
    current, before = torch.cuda.current_device(), torch.cuda.memory_allocated(device)
    assert current == device.index
    torch.cuda.reset_peak_memory_stats(device)
    yield
    assert torch.cuda.current_device() == current
    assert torch.cuda.max_memory_allocated(device) == before


@torch.no_grad()
@pytest.mark.parametrize(
    ("capture", "dtype"),
    [("lazy", torch.float32), ("lazy", torch.bfloat16), ("upfront", torch.bfloat16)],
    ids=["lazy-float32", "lazy-bfloat16", "upfront-bfloat16"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_tower_that_is_not_on_the_current_device_has_graphs(
    name: str,
    capture: Any,
    dtype: torch.dtype,
    first: torch.device,
    second: torch.device,
) -> None:
    tower = build(name, second, dtype)
    calls = calls_of(tower, second)
    config = GraphConfig(
        token_budgets=(64, 128),
        row_budgets=(1, 2),
        max_items=2,
        capture=capture,
        compile_blocks=False,
    )
    with nothing_on(first, second), mmgraph.attach(tower, config) as handle:
        assert (len(handle.stats().graphs) > 1) is (capture == "upfront")
        assert_right(tower, calls)
        assert_right(tower, calls)
        assert_all_replayed(handle)
        assert all(t.device == second for t in tensors(tower(**calls[0])))
        handle.clear()
        if first != second:
            assert handle.estimate() > 0
        assert_right(tower, calls)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_their_own_graphs_are_captured_on_the_towers_device(
    name: str, first: torch.device, second: torch.device
) -> None:
    tower = build(name, second, torch.bfloat16)
    calls = calls_of(tower, second, count=3)
    with nothing_on(first, second), mmgraph.attach(tower, PIECEWISE) as handle:
        assert_right(tower, calls)
        stats = handle.stats()
        assert stats.hits == 2 * stats.misses[Reason.PIECEWISE] > 0
        assert set(stats.misses) == {Reason.PIECEWISE}
        assert [graph.key.exact is not None for graph in stats.graphs] == [True]
        assert stats.graphs[0].replays == 2


@torch.no_grad()
def test_what_is_above_the_budgets_has_graphs_on_the_towers_device(
    first: torch.device, second: torch.device
) -> None:
    tower = build("qwen2_5_vl:tiny", second)
    calls = calls_of(tower, second, count=3)
    small = GraphConfig(token_budgets=(4,), max_items=1, compile_blocks=False)
    with nothing_on(first, second), mmgraph.attach(tower, small) as handle:
        assert_right(tower, calls)
        stats = handle.stats()
        assert stats.hits == 2 * stats.misses[Reason.ABOVE_BUDGET] > 0
        assert set(stats.misses) == {Reason.ABOVE_BUDGET}
        assert [graph.key.exact is not None for graph in stats.graphs] == [True]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_two_towers_on_two_devices_are_called_in_turns(
    name: str, first: torch.device, second: torch.device
) -> None:
    towers = [build(name, first), build(name, second)]
    calls = [calls_of(tower, place) for tower, place in zip(towers, (first, second), strict=True)]
    with mmgraph.attach(towers[0], CONFIG) as one, mmgraph.attach(towers[1], CONFIG) as other:
        for _ in range(3):
            for tower, some in zip(towers, calls, strict=True):
                assert_right(tower, some)
        assert_all_replayed(one)
        assert_all_replayed(other)


@torch.no_grad()
def test_two_towers_of_one_model_are_on_two_devices(
    first: torch.device, second: torch.device
) -> None:
    model = nn.ModuleDict({"a": build("vit:tiny", first), "b": build("vit:tiny", second)})
    calls = {"a": calls_of(model["a"], first), "b": calls_of(model["b"], second)}
    with mmgraph.attach(model, CONFIG) as handle:
        for _ in range(2):
            for name, some in calls.items():
                assert_right(model[name], some)
        assert_all_replayed(handle)
        assert set(handle.stats_by_tower()) == {"a", "b"}
        assert all(stats.hits > 0 for stats in handle.stats_by_tower().values())


@torch.no_grad()
@pytest.mark.parametrize("own_streams", [False, True], ids=["default", "streams"])
@pytest.mark.parametrize("name", NAMES)
def test_threads_call_towers_on_two_devices(
    name: str, own_streams: bool, first: torch.device, second: torch.device
) -> None:
    """Each thread calls both, the one this way round, the other that; captures are among it."""
    both = (first, second)
    towers = [build(name, place) for place in both]
    calls = [calls_of(t, place, count=4) for t, place in zip(towers, both, strict=True)]
    expected = [[in_eager_mode(t, c) for c in some] for t, some in zip(towers, calls, strict=True)]
    if first != second:
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)
    start, failures = threading.Barrier(2), list[str]()

    def streams() -> list[Any]:
        if not own_streams or first == second:
            return [nullcontext(), nullcontext()]
        return [torch.cuda.stream(torch.cuda.Stream(place)) for place in both]

    def ask(which: int, index: int, on: Any) -> None:
        with on:
            ours = tensors(towers[which](**calls[which][index]))
            assert_equal(ours, expected[which][index])  # reads it on this stream

    def work(thread: int) -> None:
        on = streams()
        start.wait()
        try:
            with torch.no_grad():
                for i in range(12):
                    which = (thread + i) % 2
                    ask(which, (thread + i // 2) % 4, on[which])
        except BaseException as caught:
            failures.append(f"thread {thread}: {type(caught).__name__}: {caught}")

    with mmgraph.attach(towers[0], CONFIG) as one, mmgraph.attach(towers[1], CONFIG) as other:
        threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert_all_replayed(one)
        assert_all_replayed(other)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@torch.no_grad()
def test_streams_of_the_other_device_take_turns_in_the_shared_buffers() -> None:
    device = torch.device("cuda:1")
    tower = build("vit:tiny", device)
    calls = calls_of(tower, device)
    expected = [in_eager_mode(tower, call) for call in calls]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    with mmgraph.attach(tower, CONFIG) as handle:
        tower(**calls[0])
        torch.cuda.synchronize(device)
        for _ in range(5):
            outputs = []
            for stream, call in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    outputs.append(tensors(tower(**call)))
            torch.cuda.synchronize(device)
            for output, truth in zip(outputs, expected, strict=True):
                assert_equal(output, truth)
        assert_all_replayed(handle)


@torch.no_grad()
@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tower_that_moves_to_the_other_device_is_never_stale(
    name: str, capture: Any, first: torch.device, second: torch.device
) -> None:
    """Graphs and buffers are those of the device on which it was attached."""
    tower = build(name, first)
    here, there = calls_of(tower, first), calls_of(tower, second)
    config = GraphConfig(
        token_budgets=(64,), row_budgets=(1, 2), max_items=2, capture=capture, compile_blocks=False
    )
    with mmgraph.attach(tower, config) as handle:
        assert_right(tower, here)
        assert_all_replayed(handle)
        hits = handle.stats().hits
        tower.to(second)
        assert_right(tower, there)
        for parameter in tower.parameters():
            parameter.mul_(1.25)
        assert_right(tower, there)
        if first == second:
            assert_all_replayed(handle)
            return
        assert all(t.device == second for t in tensors(tower(**there[0])))
        stats = handle.stats()
        assert stats.hits == hits
        assert set(stats.misses) == {Reason.PLACEMENT}
        assert stats.graphs == ()
        tower.to(first)
        assert_right(tower, here)
        if capture == "lazy":
            assert handle.stats().hits > hits
            assert set(handle.stats().misses) == {Reason.PLACEMENT}
        else:  # as after any change
            assert set(handle.stats().misses) == {Reason.PLACEMENT, Reason.CHANGED}


@torch.no_grad()
def test_exact_graphs_of_a_tower_that_moves_are_never_stale(
    first: torch.device, second: torch.device
) -> None:
    tower = build("vit:tiny", first)
    here, there = calls_of(tower, first, count=3), calls_of(tower, second, count=3)
    with mmgraph.attach(tower, PIECEWISE) as handle:
        assert_right(tower, here)
        hits = handle.stats().hits
        assert hits > 0
        tower.to(second)
        for parameter in tower.parameters():
            parameter.mul_(1.25)
        assert_right(tower, there)
        assert (handle.stats().hits > hits) is (first == second)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_inputs_on_the_other_device_give_eagers_error_and_are_counted(name: str) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    tower = build(name, second)
    (wrong,) = calls_of(tower, first, count=1)
    (right,) = calls_of(tower, second, count=1)
    with pytest.raises(RuntimeError) as unattached:
        tower(**moved(wrong, first))
    with mmgraph.attach(tower, CONFIG) as handle:
        with pytest.raises(type(unattached.value)):
            tower(**moved(wrong, first))
        assert set(handle.stats().misses) == {Reason.DEVICE}
        hits = handle.stats().hits
        assert_right(tower, [right])
        assert handle.stats().hits > hits


@torch.no_grad()
def test_grids_may_be_on_any_device(first: torch.device, second: torch.device) -> None:
    tower = build("qwen2_5_vl:tiny", second)
    calls = calls_of(tower, second)
    with mmgraph.attach(tower, CONFIG) as handle:
        for call in calls:
            for place in (torch.device("cpu"), first, second):
                ours = tower(**{**call, "grid_thw": call["grid_thw"].to(place)})
                assert_equal(tensors(ours), in_eager_mode(tower, moved(call, second)))
        assert_all_replayed(handle)


def divided(tower: nn.Module, first: Any, second: Any) -> dict[str, Any]:
    """A device map with the later half of the repeated blocks on `second`, all else on `first`."""
    blocks = find_blocks(tower)
    later = blocks[len(blocks) // 2 :]

    def places(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, child in module.named_children():
            if child in later:
                yield prefix + name, second
            elif any(part in later for part in child.modules()):
                yield from places(child, f"{prefix}{name}.")
            else:
                yield prefix + name, first

    return dict(places(tower, ""))


def for_accelerate(device: torch.device) -> int | str:
    """As ``device_map`` of transformers spells it."""
    return device.index if device.type == "cuda" else "cpu"


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_tower_that_accelerate_splits_runs_as_eager_does(
    name: str, first: torch.device, second: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    tower = build(name, torch.device("cpu"))
    whole = copy.deepcopy(tower).to(first)
    calls = calls_of(whole, first)
    device_map = divided(tower, for_accelerate(first), for_accelerate(second))
    tower = dispatch_model(tower, device_map, force_hooks=True)
    assert {p.device for p in tower.parameters()} == {first, second}
    alone = [tensors(tower(**moved(call, first))) for call in calls]
    with mmgraph.attach(tower, CONFIG) as handle:
        for call, expected in zip(calls, alone, strict=True):
            assert_equal(tensors(tower(**moved(call, first))), expected)
            assert_equal(expected, tensors(whole(**moved(call, first))))
        if first == second:
            assert_all_replayed(handle)
        else:
            assert set(handle.stats().misses) == {Reason.PLACEMENT}
            assert handle.stats().hits == 0
            assert "the encoder is split over cuda:0, cuda:1" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("everywhere", [False, True], ids=["on the tower", "on all modules"])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_tower_to_which_accelerate_moves_inputs(
    name: str, everywhere: bool, first: torch.device, second: torch.device
) -> None:
    """What comes from elsewhere is eager mode's; what is on its device has graphs."""
    tower = build(name, second)
    if everywhere:
        tower = dispatch_model(tower, {"": for_accelerate(second)}, force_hooks=True)
    else:
        add_hook_to_module(tower, AlignDevicesHook(execution_device=second, io_same_device=True))
    far = [moved(call, first) for call in calls_of(tower, first)]
    near = [moved(call, second) for call in far]
    expected = [[tensors(tower(**call)) for call in calls] for calls in (far, near)]
    with mmgraph.attach(tower, CONFIG) as handle:
        for calls, answers, place in zip((far, near), expected, (first, second), strict=True):
            for call, answer in zip(calls, answers, strict=True):
                ours = tensors(tower(**call))
                assert_equal(ours, answer)
                assert ours[0].device == place
        stats = handle.stats()
        if first == second:
            assert_all_replayed(handle)
        else:
            assert set(stats.misses) == {Reason.DEVICE}
            assert stats.hits == stats.misses[Reason.DEVICE] > 0


@torch.no_grad()
def test_a_part_that_moves_while_attached_means_eager_mode(
    first: torch.device, second: torch.device
) -> None:
    """As ``dispatch_model`` on an attached tower does, one part after the other."""
    tower = build("vit:tiny", first)
    calls = calls_of(tower, first)
    with mmgraph.attach(tower, CONFIG) as handle:
        assert_right(tower, calls)
        hits = handle.stats().hits
        last = find_blocks(tower)[-1]
        add_hook_to_module(last, AlignDevicesHook(execution_device=second, io_same_device=True))
        last.to(second)
        assert_right(tower, calls)
        if first == second:
            assert_all_replayed(handle)
        else:
            assert handle.stats().hits == hits
            assert set(handle.stats().misses) == {Reason.PLACEMENT}
