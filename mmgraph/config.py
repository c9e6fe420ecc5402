"""What the user wants: :class:`GraphConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mmgraph.errors import ConfigError

__all__ = ["Backend", "CaptureMode", "GraphConfig"]

Backend = Literal["auto", "cuda", "trace"]
CaptureMode = Literal["lazy", "upfront"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """Settings of the encoder graphs; the defaults suit an interactive VLM.

    Raises:
        ConfigError: A value is out of range. The message says what is allowed.
    """

    enforce_eager: bool = False
    """Run everything in eager mode, whatever else is set."""

    cudagraph_mm_encoder: bool = True
    """Whether encoders may run from graphs."""

    token_budgets: tuple[int, ...] | None = None
    """Sizes of the graphs in tokens of the tower (packed patches, or rows x tokens a row),
    ascending; ``None`` infers a ladder from the model."""

    row_budgets: tuple[int, ...] | None = None
    """For towers with independent rows (fixed-size images, tiles, frames): batch sizes to capture,
    ascending; ``None`` means 1, 2, 4, 8, 16, 32, unless `token_budgets` is given."""

    max_items: int = 8
    """Items that graphs captured up front can hold at once."""

    capture: CaptureMode = "lazy"
    """"lazy" records a graph when a call first needs it; "upfront" serves only what ``capture()``
    has recorded, so that no call ever waits for a capture."""

    max_graphs: int = 64
    """Graphs an encoder may hold; further sizes run in eager mode."""

    backend: Backend = "auto"
    """"cuda" (graphs), "trace" (recordings, for machines without a GPU), or whichever fits."""

    progress: bool = False
    """Show a progress bar while capturing."""

    def __post_init__(self) -> None:
        _check_budgets("token_budgets", self.token_budgets)
        _check_budgets("row_budgets", self.row_budgets)
        for name in ("token_budgets", "row_budgets"):
            if isinstance(getattr(self, name), list):  # hashable, like every other setting
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_positive("max_items", self.max_items)
        _check_positive("max_graphs", self.max_graphs)
        _check_choice("capture", self.capture, get_args(CaptureMode))
        _check_choice("backend", self.backend, get_args(Backend))
        if self.token_budgets and max(self.token_budgets) < self.max_items:
            raise ConfigError(
                f"the largest of token_budgets, {max(self.token_budgets)}, can't hold "
                f"max_items={self.max_items} items of a token each: raise it or lower max_items"
            )


def _check_budgets(name: str, budgets: tuple[int, ...] | None) -> None:
    if budgets is None:
        return
    if not isinstance(budgets, (tuple, list)):
        raise ConfigError(f"{name} must be a tuple of integers or None, got {budgets!r}")
    if not budgets:
        raise ConfigError(f"{name} is empty: give at least one budget, or None to infer them")
    for budget in budgets:
        _check_positive(f"every one of {name}", budget)
    if list(budgets) != sorted(set(budgets)):
        raise ConfigError(
            f"{name} must ascend without repeats, got {tuple(budgets)}: "
            f"use {tuple(sorted(set(budgets)))}"
        )


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
