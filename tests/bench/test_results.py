from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmgraph.bench.names import BOUND, EXACT
from mmgraph.bench.results import Report, Row
from mmgraph.bench.table import render_markdown
from tests.bench.samples import detailed_row, report, row, rows_tower_row

COMMITTED = sorted(Path(__file__).parents[2].glob("docs/benchmarks/*/bench.json"))


def test_a_report_survives_json() -> None:
    original = report(row(), rows_tower_row(), detailed_row())
    assert Report.from_json(original.to_json()) == original


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_reports_that_were_committed_can_still_be_read(path: Path) -> None:
    old = Report.from_json(path.read_text(encoding="utf-8"))
    assert old.complete
    assert old.rows
    assert Report.from_json(old.to_json()) == old
    assert all(f"## {model}\n" in render_markdown(old) for model in old.by_model)


def test_files_from_before_a_field_came_have_its_default() -> None:
    assert COMMITTED  # or the test above has tested nothing
    data = detailed_row().to_dict()
    for name in ("throughput", "costs", "bound", "absent", "kernels"):
        del data[name]
    assert Row.from_dict(data) == detailed_row(
        throughput={}, costs={}, bound=None, absent={}, kernels={}
    )


def test_every_variant_is_given_as_a_multiple_of_the_bound() -> None:
    detailed = detailed_row()
    assert detailed.over_bound[EXACT] == pytest.approx(1.25)
    assert detailed.over_bound[BOUND] == 1
    assert detailed.over_bound.keys() == detailed.tflops.keys() == detailed.timings.keys()
    assert detailed.tflops[EXACT] == pytest.approx(400)  # 4e12 operations in 10 ms
    assert detailed.to_dict()["derived"]["over_bound"] == detailed.over_bound


def test_without_a_bound_there_are_no_multiples() -> None:
    assert (row().over_bound, row().tflops) == ({}, {})


def test_json_holds_what_is_derived() -> None:
    (data,) = json.loads(report(row()).to_json())["rows"]
    assert data["derived"] == {
        "ok": True,
        "speedup": 4.0,
        "overhead_ms": pytest.approx(0.1),
        "overhead_percent": pytest.approx(1.0101, abs=1e-4),
        "overhead_ok": True,
        "over_bound": {},
        "tflops": {},
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
