"""The files of a report, whole at every moment: a run that is cut off leaves what it had."""

from __future__ import annotations

import os
from pathlib import Path

from mmgraph.bench.results import Report
from mmgraph.bench.table import render_markdown

__all__ = ["write_report"]


def write_report(report: Report, folder: Path) -> None:
    """Write `bench.json` and, from what that says, `bench.md` into `folder`."""
    data = folder / "bench.json"
    _replace(data, report.to_json())
    written = Report.from_json(data.read_text(encoding="utf-8"))
    _replace(folder / "bench.md", render_markdown(written))


def _replace(path: Path, text: str) -> None:
    """Put `text` where `path` is, all or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
