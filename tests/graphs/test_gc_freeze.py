"""The collector is frozen in a block and as it was after it; it collects at neither end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from mmgraph import freeze_gc_for_cudagraph_capture
from mmgraph.graphs.gc_freeze import frozen_by_somebody, undisturbed


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Whatever a test does to the collector ends with it."""
    assert gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    def __init__(self) -> None:
        self.me = self


def lost_cycle() -> weakref.ref[Node]:
    """A node that only the collector can free."""
    return weakref.ref(Node())


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Grows when a collection starts, whoever asks for it."""
    started: list[str] = []

    def note(phase: str, _: object) -> None:
        if phase == "start":
            started.append(phase)

    gc.callbacks.append(note)
    yield started
    gc.callbacks.remove(note)


def make_work_for_the_collector() -> None:
    cycles = [Node() for _ in range(10 * gc.get_threshold()[0])]
    del cycles


def test_nothing_is_collected_in_the_block(collections: list[str]) -> None:
    make_work_for_the_collector()
    assert collections  # such work does start it
    collections.clear()
    with freeze_gc_for_cudagraph_capture():
        assert not gc.isenabled()
        assert frozen_by_somebody()
        node = lost_cycle()
        make_work_for_the_collector()
        assert node() is not None
        assert collections == []
    make_work_for_the_collector()
    assert collections  # as always, after it
    assert node() is None


def test_garbage_from_before_stays_until_somebody_collects(collections: list[str]) -> None:
    gc.disable()
    collections.clear()
    node = lost_cycle()
    with freeze_gc_for_cudagraph_capture():
        assert node() is not None
    assert collections == []
    assert node() is not None
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_collector_is_as_it_was_on_every_way_out(
    enabled: bool, error: type[BaseException] | None
) -> None:
    (gc.enable if enabled else gc.disable)()
    frozen = frozen_by_somebody()
    if error is None:
        with freeze_gc_for_cudagraph_capture():
            pass
    else:
        with pytest.raises(error), freeze_gc_for_cudagraph_capture():
            raise error
    assert gc.isenabled() is enabled
    assert frozen_by_somebody() == frozen


@pytest.mark.parametrize("enabled", [True, False])
def test_blocks_can_be_nested(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with freeze_gc_for_cudagraph_capture():
        with freeze_gc_for_cudagraph_capture():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    assert not frozen_by_somebody()


def test_an_inner_block_leaves_the_outer_one_frozen() -> None:
    with freeze_gc_for_cudagraph_capture():
        with freeze_gc_for_cudagraph_capture():
            pass
        assert frozen_by_somebody()


def test_it_stays_off_until_the_last_thread_is_done() -> None:
    entered, leave = threading.Event(), threading.Event()

    def freeze() -> None:
        with freeze_gc_for_cudagraph_capture():
            entered.set()
            assert leave.wait(10)

    other = threading.Thread(target=freeze)
    other.start()
    assert entered.wait(10)
    with undisturbed():
        leave.set()
        other.join()
        assert not gc.isenabled(), "a graph is being recorded"
    assert gc.isenabled()


def test_what_its_user_had_frozen_stays_frozen() -> None:
    gc.freeze()
    with freeze_gc_for_cudagraph_capture():
        pass
    assert frozen_by_somebody()


def test_the_environment_can_leave_the_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMGRAPH_ENABLE_CUDAGRAPH_GC", "1")
    with freeze_gc_for_cudagraph_capture():
        assert gc.isenabled()
        assert not frozen_by_somebody()
    assert gc.isenabled()
