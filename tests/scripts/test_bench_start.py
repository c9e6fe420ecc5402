"""What a start costs is measured in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmgraph.graphs import CapturedGraph
from scripts import bench_start


def test_grids_differ_and_fit() -> None:
    made = bench_start.grids(256, 2, 10)
    assert len(made) == 10
    assert len(set(map(tuple, made))) == 10
    assert all(128 < h * w <= 256 and h % 2 == w % 2 == 0 for _, h, w in made)


def test_replays_are_noted_within_the_block_only() -> None:
    before = [kind.replay for kind in CapturedGraph.__subclasses__()]
    with pytest.raises(RuntimeError, match="inside"), bench_start.launches():
        raise RuntimeError("inside")
    assert [kind.replay for kind in CapturedGraph.__subclasses__()] == before


def test_both_processes_report(tmp_path: Path) -> None:
    budgets = ["--budgets", "16", "64"]
    bench_start.main(["--model", "qwen2_5_vl:tiny", "-n", "3", *budgets, "--out", str(tmp_path)])
    report = json.loads((tmp_path / "start.json").read_text())
    assert set(report["runs"]) == {"cold", "warm"}
    for run in report["runs"].values():
        assert (run["budgets"], run["largest"], run["misses"]) == (2, 64, {})
        assert run["known_grid_us"]["n"] == 3
        assert 0 < run["known_grid_us"]["median"] < run["seconds"] * 1e6
    text = (tmp_path / "start.md").read_text()
    assert "| cold |" in text
    assert "| warm |" in text
