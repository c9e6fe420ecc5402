"""The two files of a measurement: what was measured, and a page of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write"]


def write(folder: Path | None, name: str, report: Mapping[str, Any], page: str) -> None:
    """Write `page` and `report` as NAME.md and NAME.json into `folder`, if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(report, indent=2) + "\n"
        (folder / f"{name}.json").write_text(data, encoding="utf-8")
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
