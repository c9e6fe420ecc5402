"""Statistics: they add up, snapshots stand still, and reports can be written as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import EncoderStats, GraphKey, Reason
from mmgraph.stats import GraphRecord, Histogram, StatsRecorder
from tests.work import lines_run

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
    assert (recorder.snapshot().hits, recorder.snapshot().replays) == (3, 3)


def test_reset_sets_everything_to_zero() -> None:
    recorder = StatsRecorder()
    recorder.called()
    recorder.missed(Reason.GRAD, 1)
    recorder.replayed(SMALL, 1, 1)
    recorder.seen((64,))
    recorder.snapshot()
    recorder.seen((64,))
    recorder.evicted(2)
    assert recorder.snapshot().evictions == 2
    recorder.reset()
    assert recorder.snapshot() == EncoderStats()
    assert recorder.replays(SMALL) == 0


def test_totals_are_sums_over_the_graphs() -> None:
    records = (GraphRecord(SMALL, 3, 100, 0.25), GraphRecord(LARGE, 4, 1000, 0.5))
    stats = StatsRecorder().snapshot(records)
    assert (stats.graph_bytes, stats.capture_seconds) == (1100, 0.75)


def test_to_dict_is_json_with_reasons_and_keys_by_name() -> None:
    recorder = StatsRecorder()
    recorder.called()
    recorder.missed(Reason.ABOVE_BUDGET, 2)
    recorder.seen((60, 80, 60))
    recorder.replayed(LARGE, 3, 200)
    records = (GraphRecord(LARGE, 1, 1 << 20, 0.123456),)
    data = recorder.snapshot(records, budgets=(64, 256)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "calls": 1,
        "items": 5,
        "hits": 3,
        "misses": {"ABOVE_BUDGET": 2},
        "replays": 1,
        "tokens": 200,
        "padding": 56,
        "evictions": 0,
        "graphs": [
            {
                "key": "256 tokens, segments <= 4, seqlen <= 128",
                "replays": 1,
                "bytes": 1 << 20,
                "capture_seconds": 0.1235,
            }
        ],
        "call_sizes": {"200": 1},
        "item_sizes": {"60": 2, "80": 1},
        "budgets": [64, 256],
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

    def __radd__(self, other: int) -> int:
        return other + 10


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda recorder, key: recorder.missed(key, 2), {"misses": 200}),
        (lambda recorder, key: recorder.replayed(key, 3, 6), {"hits": 300, "replays": 100}),
        (lambda recorder, key: recorder.seen((key,)), {"seen": 100}),
    ],
    ids=["missed", "replayed", "seen"],
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
        "seen": sum(stats.call_sizes.values()),
        "misses": stats.misses.get(slow, 0),
        "hits": stats.hits,
        "replays": recorder.replays(slow),
    }
    assert {name: n for name, n in counted.items() if n} == expected


def test_calls_and_items_are_counted_by_their_tokens() -> None:
    recorder = StatsRecorder()
    for sizes in ((64,), (16, 64), (64, 16), (64,), ()):
        recorder.seen(sizes)
    stats = recorder.snapshot()
    assert stats.call_sizes == {0: 1, 64: 2, 80: 2}
    assert stats.item_sizes == {16: 2, 64: 4}
    recorder.seen((8,))
    assert list(recorder.snapshot().call_sizes) == [0, 8, 64, 80]  # ascending
    assert stats.call_sizes == {0: 1, 64: 2, 80: 2}  # stands still


def test_any_number_of_sizes_takes_bounded_memory_and_loses_no_count() -> None:
    recorder = StatsRecorder()
    for size in range(1, 3001):
        recorder.seen((size, size))
        assert len(recorder._pending) <= 64
    stats = recorder.snapshot()
    for counts, largest, number in ((stats.call_sizes, 6000, 3000), (stats.item_sizes, 3000, 6000)):
        assert 256 <= len(counts) <= 512
        assert sum(counts.values()) == number
        assert max(counts) == largest


@settings(deadline=None)
@given(st.integers(2, 12), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5))))
def test_a_histogram_merges_upwards_into_sizes_that_were_seen(
    limit: int, added: list[tuple[int, int]]
) -> None:
    histogram, exact = Histogram(limit), Counter[int]()
    for size, count in added:
        histogram.add(size, count)
        exact[size] += count
        assert len(histogram.counts) <= limit
    assert histogram.counts.keys() <= exact.keys()
    for bound in range(100):  # nothing is counted as smaller than it was
        merged = sum(count for size, count in histogram.counts.items() if size <= bound)
        assert merged <= sum(count for size, count in exact.items() if size <= bound)
    assert sum(histogram.counts.values()) == sum(exact.values())
    if len(exact) <= limit:
        assert histogram.counts == exact


def test_the_closest_sizes_are_merged_first() -> None:
    histogram = Histogram(4)
    for size, count in ((10, 1), (1000, 1), (100, 50), (104, 50), (101, 1)):
        histogram.add(size, count)
    # 101 to 104 pads 3 tokens and 10 to 100 pads 90; 100 to 101 pads 50, but 101 has gone.
    assert histogram.counts == {100: 51, 104: 51, 1000: 1}


def test_counting_the_sizes_of_a_call_is_one_addition() -> None:
    recorder, sizes = StatsRecorder(), tuple(range(8))
    assert max(lines_run(lambda: recorder.seen(sizes)) for _ in range(200)) < 30


def test_statistics_of_several_encoders_are_added() -> None:
    record = GraphRecord(SMALL, 1, 1, 1.0)
    one = EncoderStats(
        calls=1,
        hits=2,
        misses={Reason.GRAD: 1},
        tokens=3,
        padding=4,
        graphs=(record,),
        call_sizes={64: 1, 128: 2},
        item_sizes={64: 5},
        budgets=(64, 128),
    )
    other = EncoderStats(calls=9, misses={Reason.GRAD: 2}, call_sizes={64: 3}, budgets=(128, 256))
    assert EncoderStats.of_all([one, other]) == EncoderStats(
        calls=10,
        hits=2,
        misses={Reason.GRAD: 3},
        tokens=3,
        padding=4,
        graphs=(record,),
        call_sizes={64: 4, 128: 2},
        item_sizes={64: 5},
        budgets=(64, 128, 256),
    )
    assert EncoderStats.of_all([]) == EncoderStats()


def test_saved_statistics_are_their_dict_as_json(tmp_path: Path) -> None:
    stats = EncoderStats(calls=1, call_sizes={64: 1}, item_sizes={64: 1}, budgets=(64,))
    stats.save(tmp_path / "stats.json")
    assert json.loads((tmp_path / "stats.json").read_text(encoding="utf-8")) == stats.to_dict()
    with pytest.raises(OSError, match="none"):
        stats.save(tmp_path / "none" / "stats.json")


def test_what_a_graph_saved_is_estimated_where_it_is_timed() -> None:
    timed = GraphRecord(SMALL, 10, 1, 1.0, 0.5, replay_seconds=2e-3, eager_seconds=5e-3)
    plain = GraphRecord(LARGE, 10, 1, 1.0)
    assert timed.saved_ms == pytest.approx(30.0)
    assert plain.saved_ms is None
    stats = EncoderStats(graphs=(timed, plain))
    assert stats.saved_ms == pytest.approx(30.0)
    assert stats.compile_seconds == 0.5
    assert EncoderStats(graphs=(plain,)).saved_ms is None
    assert timed.to_dict().keys() - plain.to_dict().keys() == {
        "compile_seconds",
        "replay_ms",
        "saved_ms",
    }


def test_a_replay_serves_so_many_tokens_on_average() -> None:
    recorder = StatsRecorder()
    assert recorder.tokens_per_replay(SMALL) == 64
    recorder.replayed(SMALL, 1, 20)
    recorder.replayed(SMALL, 1, 40)
    assert recorder.tokens_per_replay(SMALL) == 30
    recorder.forget([SMALL])
    assert recorder.tokens_per_replay(SMALL) == 64
