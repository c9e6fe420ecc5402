"""What plans cost by the model: graphs of exactly the calls are the least, mmgraph is near that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmgraph.types import GraphKey
from scripts.trace_costs import TIMES, main


def test_plans_are_priced(tmp_path: Path) -> None:
    main(f"--families qwen3_vl --traces camera documents --calls 60 --out {tmp_path}".split())
    report = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))
    rows = {(row["trace"], row["way"]): row for row in report["rows"]}
    assert len(rows) == 2 * 5
    assert all(row["cost"] >= 1 for row in rows.values())
    assert all(rows[trace, "usual"]["usual / it"] == 1 for trace in ("camera", "documents"))
    camera = rows["camera", "mmgraph"]
    assert (camera["cost"], camera["in eager mode"]) == (pytest.approx(1, abs=0.02), 0)
    assert camera["padding"] == "0.0%"
    # A second time that the pages come, most have graphs of exactly their tokens.
    assert rows["documents", "mmgraph"]["cost"] < 0.9 * rows["documents", "usual"]["cost"]
    assert rows["documents", "mmgraph, as few"]["graphs"] <= 8
    assert rows["documents", "mmgraph, fitted"]["graphs"] <= 16
    page = (tmp_path / "costs.md").read_text(encoding="utf-8")
    assert "| qwen3_vl | camera | usual | " in page
    assert "Command: `python -m scripts.trace_costs --families qwen3_vl" in page


def test_times_are_those_that_were_measured() -> None:
    """Milliseconds in docs/benchmarks/2026-12-01-h200, traces of commit f87b29f."""
    times = TIMES["qwen3_vl"]
    page = GraphKey(10080, (1,), (10080,), uniform=(True,))
    assert times.of_replay(page, 10080**2) == pytest.approx(55.6, rel=0.05)
    assert times.of_eager(10080, 10080**2) == pytest.approx(77.5, rel=0.05)
    assert times.of_eager(20400, 2 * 10200**2) == pytest.approx(149.4, rel=0.05)
    assert times.of_eager(26772, 8160**2 + 10032**2 + 8580**2) == pytest.approx(185.8, rel=0.05)
    photos = GraphKey(8192, (8,), (8192,))
    squares = 2688**2 + 1040**2 + 3072**2 + 1200**2
    assert times.of_replay(photos, squares) == pytest.approx(26.8, rel=0.05)
    assert TIMES["qwen2_5_vl"].of_replay(GraphKey(4960, (1,), (4960,)), 4960**2) == pytest.approx(
        14.7, rel=0.05
    )
