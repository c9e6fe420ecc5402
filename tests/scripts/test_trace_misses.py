"""Traces are served in full where there are as few graphs as budgets, and the page says so."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.trace_misses import main


def test_nothing_runs_in_eager_mode_with_a_graph_a_budget(tmp_path: Path) -> None:
    main(f"--graphs 3 --calls 25 --shrink 12 --out {tmp_path}".split())
    report = json.loads((tmp_path / "misses.json").read_text(encoding="utf-8"))
    assert [row["trace"] for row in report["rows"]] == ["photos", "documents", "chat"]
    for row in report["rows"]:
        assert row["graphs"] == 3
        assert row["items"] > 25
        assert row["in eager mode"] == 0
        assert row["replays"] > 0
    page = (tmp_path / "misses.md").read_text(encoding="utf-8")
    assert "| photos | 3 | " in page
    assert "Command: `python -m scripts.trace_misses --graphs 3 --calls 25" in page
