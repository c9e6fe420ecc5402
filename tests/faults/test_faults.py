"""Each known fault, put in by hand, is caught by the guard that is there for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import mmgraph
from mmgraph import EncoderCudaGraphManager, GraphConfig, Reason, ReplayError
from mmgraph.graphs import StaticBuffers
from mmgraph.graphs.trace import TracedGraph
from mmgraph.manager.outputs import Collector
from mmgraph.recipes import load_recipe
from tests.faults.encoders import (
    BakedMetadata,
    LeakingPadding,
    MultipliedPadding,
    Probed,
    ReadsOnHost,
    StaleMetadata,
    WrongOrder,
    call_on,
    is_right,
    manager_of,
    probed,
)
from tests.manager.engine import EngineEncoder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CALLS = ([8], [4, 2], [2, 4, 2], [16, 6, 8])


def answers(manager: EncoderCudaGraphManager, device: str) -> list[bool]:
    return [is_right(manager, call_on(device, lengths)) for lengths in CALLS]


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_without_a_fault_every_guard_lets_graphs_serve(device: str) -> None:
    manager = manager_of(Probed, device, verify_every=1)
    assert all(answers(manager, device))
    assert manager.stats().misses == {}


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [StaleMetadata, BakedMetadata, LeakingPadding, WrongOrder])
def test_probes_keep_a_wrong_graph_from_serving(fault: type[EngineEncoder], device: str) -> None:
    assert not all(answers(manager_of(fault, device), device))  # so the fault is one
    manager = manager_of(probed(fault), device)
    assert all(answers(manager, device))
    assert Reason.CAPTURE_FAILED in manager.stats().misses


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [StaleMetadata, BakedMetadata, LeakingPadding, WrongOrder])
def test_without_probes_comparing_calls_finds_it(fault: type[EngineEncoder], device: str) -> None:
    manager = manager_of(fault, device, verify_every=1)
    answers(manager, device)
    if device == "cuda":
        torch.cuda.synchronize()
    assert all(answers(manager, device))
    assert Reason.DIFFERED in manager.stats().misses


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_padding_rows(device: str) -> None:
    def poisoned(kind: type[EngineEncoder], **config: Any) -> EncoderCudaGraphManager:
        manager = manager_of(kind, device, **config)
        assert is_right(manager, call_on(device, [6]))
        for arena in manager._store.arenas.values():
            arena.storage["patches"].fill_(float("nan"))
        return manager

    assert is_right(poisoned(Probed), call_on(device, [6]))
    manager = poisoned(MultipliedPadding, verify_every=1)
    assert not is_right(manager, call_on(device, [6]))
    if device == "cuda":
        torch.cuda.synchronize()
    assert is_right(manager, call_on(device, [6]))
    assert manager.stats().misses == {Reason.DIFFERED: 1}


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_what_reads_on_the_host_is_not_captured(device: str) -> None:
    manager = manager_of(ReadsOnHost, device)
    assert all(answers(manager, device))
    assert set(manager.stats().misses) == {Reason.CAPTURE_FAILED}
    assert manager.stats().hits == 0


def renew(module: Any, name: str) -> None:
    """Put another parameter in the place of one; the memory of the old one is free then."""
    weight = getattr(module, name)
    setattr(module, name, nn.Parameter(-weight.detach().clone(), requires_grad=False))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_a_stale_weight_is_noticed_before_the_next_replay(device: str) -> None:
    tower = load_recipe("clip:tiny").build_encoder(device=device)
    side = tower.config.image_size
    pixels = torch.randn(2, 3, side, side, device=device)
    with mmgraph.attach(tower, GraphConfig(row_budgets=(2,))) as handle:
        before = tower(pixels).last_hidden_state
        renew(next(m for m in tower.modules() if isinstance(m, nn.Linear)), "weight")
        after = tower(pixels).last_hidden_state
        assert handle.stats().hits == 4
    expected = tower(pixels).last_hidden_state
    assert not torch.allclose(after, before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_a_stale_weight_of_an_encoder_that_is_not_watched_is_found_by_comparing(
    device: str,
) -> None:
    manager = manager_of(EngineEncoder, device, verify_every=1)
    assert is_right(manager, call_on(device, [8]))
    old = manager.model.merge.weight  # kept, or the device would be lost
    renew(manager.model.merge, "weight")
    assert not is_right(manager, call_on(device, [8]))
    if device == "cuda":
        torch.cuda.synchronize()
    assert is_right(manager, call_on(device, [8]))
    assert manager.stats().misses == {Reason.DIFFERED: 1}
    del old


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", ["freed", "regrown"])
def test_debug_mode_notices_buffers_that_moved(
    monkeypatch: pytest.MonkeyPatch, fault: str, device: str
) -> None:
    monkeypatch.setenv("MMGRAPH_DEBUG", "1")
    manager = manager_of(EngineEncoder, device)
    call = call_on(device, [8])
    assert is_right(manager, call)
    (entry,) = manager._store.entries.values()
    view = entry.buffers.views["patches"]
    if fault == "freed":
        entry.buffers.views["patches"] = view.clone()
    else:
        storage = view.untyped_storage()
        storage.resize_(64 * storage.nbytes())
    with pytest.raises(ReplayError, match="'patches' was captured at"):
        manager.execute(call)
    manager.clear()
    assert is_right(manager, call)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_an_arena_never_grows_under_a_graph(device: str) -> None:
    manager = manager_of(EngineEncoder, device)
    assert is_right(manager, call_on(device, [8]))
    (arena,) = manager._store.arenas.values()
    (key,) = manager._store.entries
    larger = mmgraph.GraphKey(64, key.segment_capacity, (64,), key.signature)
    with pytest.raises(ReplayError, match="can't grow under live graphs"):
        arena.views(manager.model.capture_inputs(larger))
    manager.use_budgets((8, 64))  # the right way: all graphs go first
    assert not manager.stats().graphs
    for lengths in ([8], [60], [8]):
        assert is_right(manager, call_on(device, lengths))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_debug_mode_notices_outputs_in_the_memory_of_a_graph(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def without_copy(self: Any, items: Any, tensors: Any) -> None:
        self.results = list(tensors)

    monkeypatch.setenv("MMGRAPH_DEBUG", "1")
    manager = manager_of(EngineEncoder, device)
    call = call_on(device, [8])
    assert is_right(manager, call)
    with monkeypatch.context() as patched:
        patched.setattr(Collector, "add", without_copy)
        with pytest.raises(ReplayError, match="lies in the memory of its graph"):
            manager.execute(call)
    assert is_right(manager, call)


class Injected(Exception):
    """What a step raises."""


STEPS = [
    (EngineEncoder, "item_specs"),
    (EngineEncoder, "replay_inputs"),
    (EngineEncoder, "select_items"),
    (EngineEncoder, "embed_multimodal"),
    (StaticBuffers, "load"),
    (TracedGraph, "replay"),
    (Collector, "add"),
]


@torch.no_grad()
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_an_exception_in_any_step_harms_no_later_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    manager = manager_of(EngineEncoder, mode="full")
    call = call_on("cpu", [8, 40, 4])  # replays, and an item that is too large for them
    assert is_right(manager, call)
    before = manager.stats()

    def raises(*_: Any, **__: Any) -> Any:
        raise Injected(step)

    with monkeypatch.context() as patched:
        patched.setattr(owner, step, raises)
        with pytest.raises(Injected, match=step):
            manager.execute(call)
    verdicts: list[bool] = []
    other = threading.Thread(target=lambda: verdicts.append(is_right(manager, call)))
    other.start()  # no lock is held
    other.join(60)
    assert verdicts == [True]
    stats = manager.stats()
    assert stats.calls == before.calls + 2
    assert stats.items == stats.hits + sum(stats.misses.values())
    assert before.items + 3 <= stats.items <= before.items + 6
    assert len(stats.graphs) == len(before.graphs)
