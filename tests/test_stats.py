"""Statistics: they add up, snapshots stand still, and reports can be written as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import EncoderStats, GraphKey, Reason
from mmgraph.stats import GraphRecord, StatsRecorder

SMALL, LARGE = GraphKey(64), GraphKey(256, (4,), (128,), "signature")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, *Reason]), st.integers(0, 9)), max_size=30))
def test_items_are_hits_and_misses_by_reason(events: list[tuple[Reason | None, int]]) -> None:
    recorder = StatsRecorder()
    for reason, num_items in events:
        recorder.called()
        if reason is None:
            recorder.replayed(LARGE, num_items, num_items)
        else:
            recorder.missed(reason, num_items)
    stats = recorder.snapshot()
    assert stats.calls == len(events)
    assert stats.items == stats.hits + sum(stats.misses.values()) == sum(n for _, n in events)
    assert stats.hits == sum(n for reason, n in events if reason is None)
    for reason in Reason:
        assert stats.misses.get(reason, 0) == sum(n for r, n in events if r is reason)


def test_a_replay_counts_real_tokens_and_padding() -> None:
    recorder = StatsRecorder()
    recorder.replayed(SMALL, 2, 40)
    recorder.replayed(LARGE, 1, 256)
    stats = recorder.snapshot()
    assert (stats.hits, stats.tokens, stats.padding) == (3, 40 + 256, 24)


def test_a_reason_without_items_is_not_listed() -> None:
    recorder = StatsRecorder()
    recorder.missed(Reason.NO_ITEMS, 0)
    assert recorder.snapshot().misses == {}


def test_a_snapshot_stands_still() -> None:
    recorder = StatsRecorder()
    recorder.called()
    recorder.missed(Reason.GRAD, 1)
    before = recorder.snapshot()
    recorder.called()
    recorder.missed(Reason.GRAD, 5)
    recorder.missed(Reason.DTYPE, 5)
    recorder.replayed(SMALL, 1, 1)
    assert before == EncoderStats(calls=1, misses={Reason.GRAD: 1})
    before.misses[Reason.GRAD] = 100
    assert recorder.snapshot().misses[Reason.GRAD] == 6


def test_forget_drops_the_replays_of_those_graphs_only() -> None:
    recorder = StatsRecorder()
    for key in (SMALL, SMALL, LARGE):
        recorder.replayed(key, 1, 1)
    assert (recorder.replays(SMALL), recorder.replays(LARGE)) == (2, 1)
    recorder.forget([SMALL, GraphKey(1)])
    assert (recorder.replays(SMALL), recorder.replays(LARGE)) == (0, 1)
    assert recorder.snapshot().hits == 3


def test_reset_sets_everything_to_zero() -> None:
    recorder = StatsRecorder()
    recorder.called()
    recorder.missed(Reason.GRAD, 1)
    recorder.replayed(SMALL, 1, 1)
    recorder.reset()
    assert recorder.snapshot() == EncoderStats()
    assert recorder.replays(SMALL) == 0


def test_totals_are_sums_over_the_graphs() -> None:
    records = (GraphRecord(SMALL, 3, 100, 0.25), GraphRecord(LARGE, 4, 1000, 0.5))
    stats = StatsRecorder().snapshot(records)
    assert (stats.replays, stats.graph_bytes, stats.capture_seconds) == (7, 1100, 0.75)


def test_to_dict_is_json_with_reasons_and_keys_by_name() -> None:
    recorder = StatsRecorder()
    recorder.called()
    recorder.missed(Reason.ABOVE_BUDGET, 2)
    recorder.replayed(LARGE, 3, 200)
    data = recorder.snapshot((GraphRecord(LARGE, 1, 1 << 20, 0.123456),)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "calls": 1,
        "items": 5,
        "hits": 3,
        "misses": {"ABOVE_BUDGET": 2},
        "tokens": 200,
        "padding": 56,
        "graphs": [
            {
                "key": "256 tokens, segments <= 4, seqlen <= 128",
                "replays": 1,
                "bytes": 1 << 20,
                "capture_seconds": 0.1235,
            }
        ],
    }


def test_the_bounds_of_several_kinds_of_attention_are_listed() -> None:
    key = GraphKey(1024, (4, 16), (512, 64))
    assert str(key) == "1024 tokens, segments <= 4/16, seqlen <= 512/64"
    assert str(SMALL) == "64 tokens"


class Slow:
    """A reason or key that takes long to look up, so that threads meet between read and write."""

    token_budget = 10

    def __hash__(self) -> int:
        time.sleep(1e-4)
        return 1


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda recorder, key: recorder.missed(key, 2), {"misses": 200}),
        (lambda recorder, key: recorder.replayed(key, 3, 6), {"hits": 300, "replays": 100}),
    ],
    ids=["missed", "replayed"],
)
def test_threads_lose_no_count(
    count: Callable[[StatsRecorder, Any], None], expected: dict[str, int]
) -> None:
    recorder, start, slow = StatsRecorder(), threading.Barrier(4), Slow()

    def work() -> None:
        start.wait()
        for _ in range(25):
            count(recorder, slow)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = recorder.snapshot()
    counted = {
        "misses": stats.misses.get(slow, 0),
        "hits": stats.hits,
        "replays": recorder.replays(slow),
    }
    assert {name: n for name, n in counted.items() if n} == expected
