"""docs/reasons.md has a line for each reason, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from mmgraph import Reason

PAGE = Path(__file__).parents[1] / "docs" / "reasons.md"


def test_every_reason_is_explained_in_the_order_of_its_kind() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [name for name, _, _ in rows] == [reason.name for reason in Reason]
    assert all(when.strip() and what.strip() for _, when, what in rows)
