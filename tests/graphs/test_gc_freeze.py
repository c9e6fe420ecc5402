"""The collector is frozen in a block and as it was after it, however the block is left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mmgraph import freeze_gc_for_cudagraph_capture


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


def test_nothing_is_collected_in_the_block() -> None:
    with freeze_gc_for_cudagraph_capture():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        node = lost_cycle()
        [[] for _ in range(10_000)]
        assert node() is not None
    assert node() is None


def test_garbage_is_collected_before_the_block() -> None:
    gc.disable()
    node = lost_cycle()
    with freeze_gc_for_cudagraph_capture():
        assert node() is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_collector_is_as_it_was_on_every_way_out(
    enabled: bool, error: type[BaseException] | None
) -> None:
    (gc.enable if enabled else gc.disable)()
    frozen = gc.get_freeze_count()
    if error is None:
        with freeze_gc_for_cudagraph_capture():
            pass
    else:
        with pytest.raises(error), freeze_gc_for_cudagraph_capture():
            raise error
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize("enabled", [True, False])
def test_blocks_can_be_nested(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with freeze_gc_for_cudagraph_capture():
        with freeze_gc_for_cudagraph_capture():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


def test_an_inner_block_leaves_the_outer_one_frozen() -> None:
    with freeze_gc_for_cudagraph_capture():
        with freeze_gc_for_cudagraph_capture():
            pass
        assert gc.get_freeze_count() > 0


def test_what_its_user_had_frozen_stays_frozen() -> None:
    gc.freeze()
    with freeze_gc_for_cudagraph_capture():
        pass
    assert gc.get_freeze_count() > 0


def test_the_environment_can_leave_the_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMGRAPH_ENABLE_CUDAGRAPH_GC", "1")
    with freeze_gc_for_cudagraph_capture():
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
    assert gc.isenabled()
