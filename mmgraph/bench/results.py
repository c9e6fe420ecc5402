"""What the benchmark found, as data: `bench.json` is a `Report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmgraph.bench.environment import Environment
from mmgraph.bench.names import BOUND, EAGER, EXACT, HAND_MADE
from mmgraph.bench.records import Bound, Cost, Served, Throughput
from mmgraph.bench.timing import Timing

__all__ = ["Report", "Row"]

_DERIVED = (
    "ok",
    "speedup",
    "overhead_ms",
    "overhead_percent",
    "overhead_ok",
    "over_bound",
    "tflops",
)
_ALLOWED_OVERHEAD = 0.05
_ALLOWED_OVERHEAD_MS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One call of one model.

    Files that were written before a field came have its default.

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
        throughput: Calls back to back, by variant.
        costs: What graphs and compiled code took to make, by variant.
        bound: What the practical bound consists of, where it was measured.
        absent: Why variants that were asked for aren't there.
        kernels: Milliseconds of a call by class of kernel, by variant, where those were asked for.
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
    throughput: Mapping[str, Throughput] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    bound: Bound | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

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

    @property
    def over_bound(self) -> dict[str, float]:
        """The median of each variant as a multiple of the practical bound; empty without one."""
        if BOUND not in self.timings:
            return {}
        bound = self.timings[BOUND].median_ms
        return {name: timing.median_ms / bound for name, timing in self.timings.items()}

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s that each variant reaches at its median; empty without a bound."""
        if self.bound is None:
            return {}
        flops = self.bound.flops
        return {name: flops / timing.median_ms / 1e9 for name, timing in self.timings.items()}

    def to_dict(self) -> dict[str, Any]:
        """Fields and what is derived from them, JSON-ready."""
        return {**asdict(self), "derived": {name: getattr(self, name) for name in _DERIVED}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """Undo :meth:`to_dict`."""
        fields = {name: value for name, value in data.items() if name != "derived"}
        fields["timings"] = {name: Timing(**t) for name, t in data["timings"].items()}
        fields["served"] = {
            name: Served(**{**s, "budgets": tuple(s["budgets"])})
            for name, s in data["served"].items()
        }
        fields["throughput"] = {n: Throughput(**t) for n, t in data.get("throughput", {}).items()}
        fields["costs"] = {name: Cost(**cost) for name, cost in data.get("costs", {}).items()}
        bound = data.get("bound")
        fields["bound"] = None if bound is None else Bound.from_dict(bound)
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
        complete: Whether these are all models of the run; else it was still going on.
    """

    environment: Environment
    command: str
    date: str
    dtype: str
    repeats: int
    warmup: int
    rows: tuple[Row, ...]
    complete: bool = True

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
