"""Eager calls of other threads never run into what a capture has altered, nor it into them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import mmgraph.encoders.tower as tower
from mmgraph.preparation.turns import Turns
from tests.encoders.cases import make_encoder

A_WHILE, TOO_LONG = 0.1, 20.0


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@contextmanager
def held(pool: ThreadPoolExecutor, enter: Callable[[], Any]) -> Iterator[None]:
    """Another thread is in the block of `enter` within this one."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with enter():
            entered.set()
            assert leave.wait(TOO_LONG)

    future = pool.submit(hold)
    assert entered.wait(TOO_LONG)
    try:
        yield
    finally:
        leave.set()
        future.result(TOO_LONG)


def enter_and_leave(enter: Callable[[], Any]) -> None:
    with enter():
        pass


def waits(future: Future[None]) -> bool:
    return not wait([future], A_WHILE).done


def test_any_number_of_threads_run_it_together(others: ThreadPoolExecutor) -> None:
    turns = Turns()
    with held(others, turns.together), held(others, turns.together), turns.together():
        pass


@pytest.mark.parametrize("first", ["together", "alone"])
def test_whoever_is_alone_is_alone(others: ThreadPoolExecutor, first: str) -> None:
    turns = Turns()
    second = turns.alone if first == "together" else turns.together
    with held(others, getattr(turns, first)):
        future = others.submit(enter_and_leave, second)
        assert waits(future)
    future.result(TOO_LONG)


def test_two_are_not_alone_at_a_time(others: ThreadPoolExecutor) -> None:
    turns = Turns()
    with held(others, turns.alone):
        future = others.submit(enter_and_leave, turns.alone)
        assert waits(future)
    future.result(TOO_LONG)


def test_whoever_waits_to_be_alone_comes_before_later_calls(others: ThreadPoolExecutor) -> None:
    turns = Turns()
    with turns.together():
        alone = others.submit(enter_and_leave, turns.alone)
        assert waits(alone)
        late = others.submit(enter_and_leave, turns.together)
        assert waits(late)
        with turns.together():  # but a call that runs already can't be held up
            pass
    alone.result(TOO_LONG)
    late.result(TOO_LONG)


@pytest.mark.parametrize("inner", ["together", "alone"])
@pytest.mark.parametrize("outer", ["together", "alone"])
def test_blocks_of_a_thread_can_be_nested(
    others: ThreadPoolExecutor, outer: str, inner: str
) -> None:
    turns = Turns()
    with getattr(turns, outer)():
        enter_and_leave(getattr(turns, inner))
        other = turns.together if outer == "alone" else turns.alone
        future = others.submit(enter_and_leave, other)
        assert waits(future)
    future.result(TOO_LONG)


@pytest.mark.parametrize("block", ["together", "alone"])
def test_an_error_ends_a_turn(others: ThreadPoolExecutor, block: str) -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="left"), getattr(turns, block)():
        raise ValueError("left")
    others.submit(enter_and_leave, turns.alone).result(TOO_LONG)


@torch.no_grad()
def test_an_eager_call_beside_a_capture_sees_the_tower_as_it_is(
    others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which attention runs stands in the config, where a capture puts another name."""
    encoder = make_encoder("packed")
    config, call = encoder.tower.module.config, encoder.example_call()
    expected, own = encoder.embed_multimodal(**call), config._attn_implementation
    altered, tried = threading.Event(), threading.Event()
    original, seen = encoder._original, {}
    attending = tower.attending

    def runs(*args: Any, **kwargs: Any) -> Any:
        seen[threading.get_ident()] = config._attn_implementation
        return original(*args, **kwargs)

    @contextmanager
    def slow(*args: Any, **kwargs: Any) -> Iterator[None]:
        altered.set()
        tried.wait(A_WHILE)
        with attending(*args, **kwargs):
            yield

    def capture() -> None:
        encoder.exact_forward(**call)

    monkeypatch.setattr(encoder, "_original", runs)
    monkeypatch.setattr(tower, "attending", slow)
    future = others.submit(capture)
    assert altered.wait(TOO_LONG)
    torch.testing.assert_close(encoder.embed_multimodal(**call), expected)
    tried.set()
    future.result(TOO_LONG)
    assert seen.pop(threading.get_ident()) == own
    assert list(seen.values()) == [tower.VARLEN_ATTENTION]
    assert config._attn_implementation == own
