"""What the benchmark found, as data: `bench.json` is a `Report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmgraph.bench.environment import Environment
from mmgraph.bench.timing import Timing

__all__ = [
    "DEFAULT",
    "EAGER",
    "EXACT",
    "HAND_MADE",
    "LABELS",
    "METADATA",
    "Report",
    "Row",
    "Served",
]

EAGER = "eager"
METADATA = "eager_metadata"
HAND_MADE = "hand_made"
EXACT = "mmgraph_exact"
DEFAULT = "mmgraph_default"
LABELS = {
    EAGER: "eager",
    METADATA: "eager+metadata",
    HAND_MADE: "hand-made graph",
    EXACT: "mmgraph, exact budget",
    DEFAULT: "mmgraph, default budgets",
}

_ALLOWED_OVERHEAD = 0.05
_ALLOWED_OVERHEAD_MS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """How mmgraph served one call.

    Attributes:
        budgets: Token budget of each replay.
        padding: Tokens replayed that belonged to no item.
        eager: Items that ran in eager mode instead.
    """

    budgets: tuple[int, ...]
    padding: int
    eager: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One call of one model.

    Attributes:
        model: Name of the recipe.
        size: "448x4" (images of 448 x 448, four of them), or the batch size.
        items: Images, clips or rows in the call.
        tokens: The tower's own rows.
        timings: By variant.
        errors: Relative error against the float32 twin, by variant.
        errors_to_eager: Relative error against eager mode, by variant.
        served: How mmgraph served its variants.
        match: Whether mmgraph's outputs are as good as those of eager mode.
    """

    model: str
    size: str
    items: int
    tokens: int
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]
    errors_to_eager: Mapping[str, float]
    served: Mapping[str, Served]
    match: bool

    @property
    def ok(self) -> bool:
        """Whether the row counts: outputs match, and the exact budget was really replayed."""
        return self.match and self.served[EXACT].eager == 0

    @property
    def speedup(self) -> float:
        """Eager over mmgraph with an exact budget, of medians."""
        return self.timings[EAGER].median_ms / self.timings[EXACT].median_ms

    @property
    def overhead_ms(self) -> float | None:
        """What mmgraph takes longer than a graph made by hand, or ``None`` without one."""
        if HAND_MADE not in self.timings:
            return None
        return self.timings[EXACT].median_ms - self.timings[HAND_MADE].median_ms

    @property
    def overhead_percent(self) -> float | None:
        """The same in percent of the graph made by hand."""
        if self.overhead_ms is None:
            return None
        return 100 * self.overhead_ms / self.timings[HAND_MADE].median_ms

    @property
    def overhead_ok(self) -> bool | None:
        """Whether that is at most 5 % or 0.25 ms, whichever is more."""
        if self.overhead_ms is None:
            return None
        hand_made = self.timings[HAND_MADE].median_ms
        return self.overhead_ms <= max(_ALLOWED_OVERHEAD * hand_made, _ALLOWED_OVERHEAD_MS)

    def to_dict(self) -> dict[str, Any]:
        """Fields and what is derived from them, JSON-ready."""
        derived = ("ok", "speedup", "overhead_ms", "overhead_percent", "overhead_ok")
        return {**asdict(self), "derived": {name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """Undo :meth:`to_dict`."""
        fields = {name: value for name, value in data.items() if name != "derived"}
        fields["timings"] = {name: Timing(**t) for name, t in data["timings"].items()}
        fields["served"] = {
            name: Served(**{**s, "budgets": tuple(s["budgets"])})
            for name, s in data["served"].items()
        }
        return cls(**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run of the benchmark.

    Attributes:
        environment: Where it ran.
        command: How to run it again.
        date: When, in UTC (ISO 8601).
        dtype: Of weights and inputs.
        repeats: Timed calls of each variant.
        warmup: Calls before them.
        rows: In the order in which they were measured.
    """

    environment: Environment
    command: str
    date: str
    dtype: str
    repeats: int
    warmup: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every row counts."""
        return all(row.ok for row in self.rows)

    @property
    def by_model(self) -> dict[str, list[Row]]:
        """Rows of each model."""
        models = dict.fromkeys(row.model for row in self.rows)
        return {model: [row for row in self.rows if row.model == model] for model in models}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        data = {**asdict(self), "rows": [row.to_dict() for row in self.rows]}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Undo :meth:`to_json`."""
        data = json.loads(text)
        data["environment"] = Environment(**data["environment"])
        data["rows"] = tuple(Row.from_dict(row) for row in data["rows"])
        return cls(**data)
