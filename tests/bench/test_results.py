from __future__ import annotations

import json

import pytest

from mmgraph.bench.results import Report
from tests.bench.samples import report, row, rows_tower_row


def test_a_report_survives_json() -> None:
    original = report(row(), rows_tower_row())
    assert Report.from_json(original.to_json()) == original


def test_json_holds_what_is_derived() -> None:
    (data,) = json.loads(report(row()).to_json())["rows"]
    assert data["derived"] == {
        "ok": True,
        "speedup": 4.0,
        "overhead_ms": pytest.approx(0.1),
        "overhead_percent": pytest.approx(1.0101, abs=1e-4),
        "overhead_ok": True,
    }


@pytest.mark.parametrize(
    ("exact_ms", "expected"),
    [
        (10.1, True),  # within 0.25 ms
        (10.35, True),  # within 5 % of 9.9
        (10.5, False),
    ],
)
def test_overhead_may_be_the_larger_of_both_bounds(exact_ms: float, expected: bool) -> None:
    assert row(exact_ms=exact_ms).overhead_ok is expected


def test_without_a_graph_made_by_hand_there_is_no_overhead() -> None:
    clip = rows_tower_row()
    assert (clip.overhead_ms, clip.overhead_percent, clip.overhead_ok) == (None, None, None)


def test_a_run_fails_on_a_mismatch_and_on_a_call_that_was_not_replayed() -> None:
    assert report(row()).ok
    assert not report(row(), row(match=False)).ok
    assert not report(row(), row(exact_eager=4)).ok
