"""What a row holds of each variant, besides its latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AttentionTimes", "Bound", "Cost", "Served", "Throughput"]


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
class Throughput:
    """Calls back to back, with one wait for the device at the end.

    Attributes:
        n: Calls that were timed together.
        calls_per_s: How many of them a second.
        items_per_s: Images, clips or rows a second.
    """

    n: int
    calls_per_s: float
    items_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a variant takes before its calls are fast; ``None`` where that isn't known.

    Attributes:
        first_call_s: Seconds of its first call of this size, with all that had to be made for it.
        capture_s: Seconds of those that went into warm-ups and captures of graphs.
        compile_s: Seconds of those that the compiler took, as it counts them itself.
        mib: Device memory of all graphs that the variant holds by then, also for other sizes.
    """

    first_call_s: float
    capture_s: float | None = None
    compile_s: float | None = None
    mib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTimes:
    """Kernels for attention of one shape.

    Attributes:
        shape: For people.
        calls: Calls of that shape in one call of the tower.
        flops: Floating-point operations of one of them.
        fastest: The kernel that the bound is made of.
        microseconds: Of each kernel that could do it.
        failed: Why the others couldn't.
    """

    shape: str
    calls: int
    flops: int
    fastest: str
    microseconds: Mapping[str, float]
    failed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What the practical bound of a call consists of.

    Attributes:
        products: Matrix products in one call of the tower.
        products_run: What they are in the bound, where products of one input may be one.
        product_flops: Their floating-point operations, 2 M N K each, by the tower's own widths.
        attention_flops: Those of all attention, 4 L^2 H K for each segment of L tokens.
        attention: The kernels that were tried.
        products_other: Those of the products run that aren't cuBLAS's.
    """

    products: int
    products_run: int
    product_flops: int
    attention_flops: int
    attention: tuple[AttentionTimes, ...] = field(default=())
    products_other: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return self.product_flops + self.attention_flops

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Bound:
        """Undo `dataclasses.asdict`."""
        attention = tuple(AttentionTimes(**times) for times in data["attention"])
        return cls(**{**data, "attention": attention})
