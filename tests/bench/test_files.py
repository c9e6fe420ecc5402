from __future__ import annotations

from pathlib import Path

import pytest

from mmgraph.bench import files
from mmgraph.bench.files import write_report
from mmgraph.bench.results import Report
from tests.bench.samples import detailed_row, report, row


def test_a_report_is_written_over_the_one_before(tmp_path: Path) -> None:
    write_report(report(row()), tmp_path)
    write_report(report(row(), detailed_row()), tmp_path)
    text = (tmp_path / "bench.json").read_text(encoding="utf-8")
    assert Report.from_json(text) == report(row(), detailed_row())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


def test_a_write_that_fails_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(report(row()), tmp_path)

    def disk_is_full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"{")
        raise OSError("no space left")

    monkeypatch.setattr(files.Path, "write_text", disk_is_full)
    with pytest.raises(OSError, match="no space left"):
        write_report(report(), tmp_path)
    monkeypatch.undo()
    text = (tmp_path / "bench.json").read_text(encoding="utf-8")
    assert Report.from_json(text) == report(row())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
