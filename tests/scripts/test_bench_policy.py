"""The bench of decisions runs, and writes what it found."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.bench_policy import main


def test_each_decision_is_timed(tmp_path: Path) -> None:
    main(["-n", "3", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "policy.json").read_text(encoding="utf-8"))
    assert all(row["n"] == 3 and 0 < row["median"] <= row["p99"] for row in report["rows"].values())
    text = (tmp_path / "policy.md").read_text(encoding="utf-8")
    for name in report["rows"]:
        assert f"| {name} | 3 | " in text
    assert "Command: `python -m scripts.bench_policy -n 3" in text
