"""The decoder's graphs: captured by dummy runs, and never dispatched to where there is none."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

import mmgraph.orchestration
from mmgraph import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CUDAGraphMode,
    DecoderGraphs,
    Reason,
)
from mmgraph.graphs import select_backend
from tests.orchestration.engine import (
    BATCHES,
    BOTH,
    FULL,
    NONE,
    PIECEWISE,
    Engine,
    assert_serves,
    no_memory,
)

LARGEST_FIRST = [BatchDescriptor(n) for n in (16, 8, 4)]


@pytest.mark.parametrize(
    ("mode", "modes"), [(FULL, [FULL]), (PIECEWISE, [PIECEWISE]), (BOTH, [FULL, PIECEWISE])]
)
def test_each_batch_is_captured_in_each_mode_the_largest_first(
    device: str, mode: CUDAGraphMode, modes: list[CUDAGraphMode]
) -> None:
    engine = Engine(device)
    decoder, seen = engine.decoder(mode), list[BatchDescriptor]()
    assert all(decoder.mode_for(d) is NONE for d in BATCHES)
    graphs = decoder.capture(seen.append)
    assert engine.runs == [(m, d.num_tokens) for d in LARGEST_FIRST for m in modes]
    assert [d.num_tokens for d in seen] == [tokens for _, tokens in engine.runs]
    assert graphs == 3 * ((FULL in modes) + 2 * (PIECEWISE in modes))
    full, pieces = [4, 8, 16] * (FULL in modes), [4, 8, 16] * (PIECEWISE in modes)
    assert engine.captured() == {"first": pieces, "second": pieces, "whole": full}
    for descriptor in BATCHES:
        assert decoder.mode_for(descriptor) is modes[0]
        assert_serves(engine, decoder, descriptor)
    assert decoder.failed == {}


def test_a_batch_that_was_not_asked_for_runs_eagerly(device: str) -> None:
    engine = Engine(device)
    decoder = engine.decoder(BOTH)
    decoder.capture()
    assert decoder.mode_for(BatchDescriptor(5)) is NONE
    assert decoder.mode_for(BatchDescriptor(4, num_items=1)) is NONE


def test_mode_none_captures_nothing(device: str) -> None:
    engine = Engine(device)
    assert engine.decoder(NONE).capture() == 0
    assert engine.runs == []


def test_capturing_again_does_nothing_and_clear_starts_anew(device: str) -> None:
    engine = Engine(device)
    decoder = engine.decoder(BOTH)
    assert decoder.capture() == 9
    runs = list(engine.runs)
    assert decoder.capture() == 0
    assert engine.runs == runs
    decoder.clear()
    assert engine.captured() == {"first": [], "second": [], "whole": []}
    assert decoder.mode_for(BATCHES[0]) is NONE
    assert decoder.capture() == 9
    assert_serves(engine, decoder, BATCHES[0])


def test_where_memory_runs_out_that_batch_is_freed_and_the_others_stay(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[int] = []
    monkeypatch.setattr(mmgraph.orchestration, "clean_up", lambda: cleaned.append(len(engine.runs)))
    engine = Engine(device)
    engine.fails = {(FULL, 16): no_memory(), (FULL, 8): no_memory(), (PIECEWISE, 16): no_memory()}
    decoder = engine.decoder(BOTH)
    assert decoder.capture() == 1 + 2 * 2
    assert cleaned == [1, 2, 3]  # after each of the runs that failed
    # The first half had been captured for 16 tokens when memory ran out in the second.
    assert engine.captured() == {"first": [4, 8], "second": [4, 8], "whole": [4]}
    assert [decoder.mode_for(BatchDescriptor(n)) for n in (16, 8, 4)] == [NONE, PIECEWISE, FULL]
    assert decoder.failed == dict.fromkeys(
        [
            (BatchDescriptor(16), FULL),
            (BatchDescriptor(16), PIECEWISE),
            (BatchDescriptor(8), FULL),
        ],
        Reason.OUT_OF_MEMORY,
    )
    engine.fails = {}
    for descriptor in BATCHES:
        assert_serves(engine, decoder, descriptor)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"BatchDescriptor(num_tokens={tokens}, num_items=None, extra=None) runs without a {mode} "
        "graph: memory ran out while capturing"
        for tokens, mode in ((16, "FULL"), (16, "PIECEWISE"), (8, "FULL"))
    ]
    assert decoder.capture() == 1 + 2 + 1  # there is memory again
    assert decoder.failed == {}
    assert decoder.mode_for(BatchDescriptor(16)) is FULL


def test_what_a_failed_dummy_run_held_is_freed_before_the_next(device: str) -> None:
    """Else a smaller batch would find memory full of the larger one's tensors."""
    held: list[weakref.ref[torch.Tensor]] = []

    def dummy_run(descriptor: BatchDescriptor) -> None:
        assert [r for r in held if r() is not None] == []
        tensor = torch.ones(descriptor.num_tokens, device=device)
        held.append(weakref.ref(tensor))
        raise no_memory()

    decoder = DecoderGraphs(dummy_run, FULL, BATCHES)
    assert decoder.capture() == 0
    assert len(held) == len(BATCHES)


@pytest.mark.parametrize("error", [ValueError("no such layer"), KeyboardInterrupt()])
def test_any_other_error_propagates_and_leaves_no_half_of_a_batch(
    device: str, error: BaseException
) -> None:
    engine = Engine(device)
    engine.fails = {(PIECEWISE, 8): error}
    decoder = engine.decoder(BOTH)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CaptureError
    with pytest.raises(expected):
        decoder.capture()
    assert engine.captured() == {"first": [16], "second": [16], "whole": [8, 16]}
    assert [decoder.mode_for(BatchDescriptor(n)) for n in (16, 8, 4)] == [FULL, FULL, NONE]


def test_a_dummy_run_that_meets_no_wrapper_of_the_mode_has_no_graph(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(device)

    def only_pieces(descriptor: BatchDescriptor) -> None:
        engine.second(engine.first(engine.buffers[descriptor]))

    decoder = DecoderGraphs(only_pieces, BOTH, BATCHES[:1])
    assert decoder.capture() == 2
    assert decoder.mode_for(BATCHES[0]) is PIECEWISE
    assert decoder.failed == {(BATCHES[0], FULL): Reason.NO_WRAPPER}
    assert "no wrapper of that mode took part" in caplog.text


def test_a_wrapper_of_every_mode_has_one_graph_for_both(device: str) -> None:
    backend = select_backend("auto", torch.device(device))
    wrapper = BreakableCUDAGraphWrapper(torch.sin, backend=backend)
    x = torch.randn(4, device=device)
    decoder = DecoderGraphs(lambda _: wrapper(x), BOTH, BATCHES[:1])
    assert decoder.capture() == 1
    assert decoder.mode_for(BATCHES[0]) is FULL
    assert decoder.failed == {}


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when"])
def test_memory_that_runs_out_outside_torch_counts_too(text: str) -> None:
    engine = Engine("cpu")
    engine.fails = {(FULL, 16): RuntimeError(text)}
    decoder = engine.decoder(FULL)
    assert decoder.capture() == 2
    assert decoder.failed == {(BatchDescriptor(16), FULL): Reason.OUT_OF_MEMORY}
