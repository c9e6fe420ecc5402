"""The two files of a measurement: what was measured, and a page of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mmgraph.bench.environment import Environment

__all__ = ["write", "write_rows"]


def write(folder: Path | None, name: str, report: Mapping[str, Any], page: str) -> None:
    """Write `page` and `report` as NAME.md and NAME.json into `folder`, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(report, indent=2) + "\n"
        (folder / f"{name}.json").write_text(data, encoding="utf-8")
        (folder / f"{name}.md").write_text(page, encoding="utf-8")


def write_rows(
    folder: Path, name: str, title: str, command: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write rows of one table, found on the CPU by `command`, and print the page."""
    environment = Environment.read(torch.device("cpu"))
    report: dict[str, Any] = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": asdict(environment),
        "rows": rows,
    }
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    machine = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    foot = f"{machine['cpu']}; {versions}; commit {machine['commit']}; {report['date']}."
    page = "\n".join([f"# {title}", "", *lines, "", foot, "", f"Command: `{command}`", ""])
    print(page)
    write(folder, name, report, page)
