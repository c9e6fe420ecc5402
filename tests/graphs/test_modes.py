"""Modes, and the context that carries them to wrappers inside a model."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from mmgraph import ConfigError
from mmgraph.graphs import (
    BatchDescriptor,
    CUDAGraphMode,
    current_forward_context,
    forward_context,
)

SMALL, LARGE = BatchDescriptor(64), BatchDescriptor(256, num_items=2, extra="video")


@pytest.mark.parametrize(
    ("mode", "full", "piecewise"),
    [
        (CUDAGraphMode.NONE, False, False),
        (CUDAGraphMode.PIECEWISE, False, True),
        (CUDAGraphMode.FULL, True, False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True, True),
    ],
)
def test_a_mode_says_which_graphs_it_has(mode: CUDAGraphMode, full: bool, piecewise: bool) -> None:
    assert mode.has_full_cudagraphs() is full
    assert mode.has_piecewise_cudagraphs() is piecewise


def test_outside_a_forward_there_is_no_context() -> None:
    assert current_forward_context() is None


def test_contexts_nest_and_end_with_their_block() -> None:
    with forward_context(CUDAGraphMode.FULL, SMALL, capture_allowed=True) as outer:
        assert current_forward_context() is outer
        assert outer.capture_allowed
        with forward_context(CUDAGraphMode.NONE, LARGE) as inner:
            assert current_forward_context() is inner
            assert not inner.capture_allowed
        assert current_forward_context() is outer
    assert current_forward_context() is None


def test_an_exception_ends_the_context_too() -> None:
    with pytest.raises(ValueError, match="x"), forward_context(CUDAGraphMode.FULL, SMALL):
        raise ValueError("x")
    assert current_forward_context() is None


@pytest.mark.parametrize("mode", ["full", None, 0])
def test_a_mode_is_one_of_the_kind(mode: Any) -> None:
    with pytest.raises(ConfigError, match="must be a CUDAGraphMode"), forward_context(mode, SMALL):
        pass


def test_a_forward_has_one_mode() -> None:
    with (
        pytest.raises(ConfigError, match="resolve FULL_AND_PIECEWISE to one"),
        forward_context(CUDAGraphMode.FULL_AND_PIECEWISE, SMALL),
    ):
        pytest.fail("there is no such context")
    assert current_forward_context() is None


def test_threads_and_tasks_have_contexts_of_their_own() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current_forward_context()))

    async def task(descriptor: BatchDescriptor) -> bool:
        with forward_context(CUDAGraphMode.FULL, descriptor) as context:
            await asyncio.sleep(0)
            return current_forward_context() is context

    async def both() -> list[bool]:
        return list(await asyncio.gather(task(SMALL), task(LARGE)))

    with forward_context(CUDAGraphMode.FULL, SMALL):
        thread.start()
        thread.join()
    assert seen == [None]
    assert asyncio.run(both()) == [True, True]


def test_descriptors_are_keys() -> None:
    assert {SMALL: 1}[BatchDescriptor(64)] == 1
    assert BatchDescriptor(64, num_items=1) != SMALL
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.num_tokens = 1  # type: ignore[misc]
