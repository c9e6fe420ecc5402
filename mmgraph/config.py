"""What the user wants: :class:`GraphConfig`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mmgraph.errors import ConfigError
from mmgraph.types import Reason

__all__ = ["Backend", "CaptureMode", "GraphConfig", "Mode", "OnChange"]

Backend = Literal["auto", "cuda", "trace"]
CaptureMode = Literal["lazy", "upfront"]
Mode = Literal["auto", "full", "piecewise"]
OnChange = Literal["recapture", "eager"]


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

    mode: Mode = "auto"
    """"full": graphs of token budgets, each of the whole tower. "piecewise": graphs of exact calls,
    broken around what can't be captured. "auto": budgets, and a graph of its own for a call that
    they can't serve (above the largest, or a tower that can't be captured for a budget) when the
    same sizes come a second time; it serves where it equals eager mode and is faster."""

    token_budgets: tuple[int, ...] | None = None
    """Sizes of the graphs in tokens of the tower (packed patches, or rows x tokens a row),
    ascending; ``None`` infers a ladder from the model. They hold for all encoders of a model; for
    those with rows each is rounded down to whole rows."""

    row_budgets: tuple[int, ...] | None = None
    """For towers with independent rows (fixed-size images, tiles, frames): batch sizes to capture,
    ascending; ``None`` means 1, 2, 4, 8, 16, 32, unless `token_budgets` is given. Where both are,
    towers with rows go by this and packed towers by the other."""

    on_change: OnChange = "recapture"
    """When an encoder isn't what was captured any more (weights replaced or moved, submodules or
    adapters swapped): "recapture" frees its graphs, and they come back on use where ``capture`` is
    "lazy"; "eager" leaves it in eager mode until ``handle.clear()``. Weights changed in place are
    followed without either."""

    verify_every: int = 0
    """Compare one call in this many with eager mode, without waiting for the device; an encoder
    whose replay differed runs in eager mode until ``handle.clear()``. 0 means never."""

    compile_blocks: bool = True
    """On a GPU, compile the repeated blocks of a tower (``torch.compile``, once for all budgets)
    before it is captured: some seconds at the first capture, less once the compiler has its cache
    on disk. Dropped where it fails or differs (with a warning) or isn't faster; the report says
    so."""

    align_weights: bool = True
    """On a GPU, keep the weights of linear layers with odd widths in padded storage, of which the
    parameters are views."""

    merge_weights: bool = True
    """On a GPU, keep the weights of linear layers that read the same input (query, key and value;
    gate and up) side by side, so that they are one matrix product; the parameters are views."""

    fuse_activations: bool = True
    """On a GPU, let a linear layer apply the GELU (tanh approximation) that follows it, on its way
    out and before it rounds. The exact GELU, which no layer can apply, takes fewer instructions in
    compiled blocks, on 16-bit numbers."""

    fuse_epilogues: bool = True
    """On a GPU for which quack is installed (``mmgraph[quack]``; flash-attn-4 brings it along),
    let the products of compiled blocks end with the additions and the gates after them, for sizes
    at which that is measured to be faster. The report shows the times."""

    choose_attention: bool = True
    """On a GPU, take for each graph of a packed tower the attention kernel that is measured to be
    the fastest: PyTorch's flash attention, a dense one where segments are all of one length (which
    then get graphs of their own), FlashAttention 4 if it is installed. The report shows the times.
    """

    max_items: int = 8
    """Items that graphs captured up front can hold at once."""

    exact_after: int = 8
    """A batch of sizes that has come this often, and that budgets pad by more than 4 %, gets a
    graph of exactly its tokens where that is faster. So does, on a GPU, an item of a packed tower
    that has come in as many different batches of several. At most half of `max_graphs` are of that
    kind, and those that come no more give way to others; 0 means never, and "upfront" has none."""

    capture: CaptureMode = "lazy"
    """"lazy" records a graph when a call first needs it; "upfront" serves only what ``capture()``
    has recorded, so that no call ever waits for a capture."""

    max_graphs: int = 64
    """Graphs an encoder may hold. Further sizes go to graphs of others that hold them, or run in
    eager mode, until one of them is clearly more useful than a graph that there is, which then
    gives way: a graph is worth how often it was replayed, lately, times the seconds that saved. The
    last ones, as many as there are budgets, each take whatever their budget holds."""

    max_graph_bytes: int | None = None
    """Device memory that an encoder's graphs and their buffers may take; ``None`` for any. A graph
    that goes beyond is freed as soon as it is captured; otherwise like `max_graphs`."""

    min_hits: int = 1
    """With ``capture="lazy"``: how often a graph must have been asked for before it is captured."""

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
        for setting in fields(self):
            if isinstance(setting.default, bool):
                _check_switch(setting.name, getattr(self, setting.name))
        _check_positive("max_items", self.max_items)
        _check_positive("max_graphs", self.max_graphs)
        if self.max_graph_bytes is not None:
            _check_positive("max_graph_bytes", self.max_graph_bytes)
        _check_positive("min_hits", self.min_hits)
        _check_count("exact_after", self.exact_after)
        _check_count("verify_every", self.verify_every)
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("on_change", self.on_change, get_args(OnChange))
        _check_choice("capture", self.capture, get_args(CaptureMode))
        _check_choice("backend", self.backend, get_args(Backend))
        if self.token_budgets and max(self.token_budgets) < self.max_items:
            raise ConfigError(
                f"the largest of token_budgets, {max(self.token_budgets)}, can't hold "
                f"max_items={self.max_items} items of a token each: raise it or lower max_items"
            )

    @property
    def closed(self) -> Reason | None:
        """Why nothing may run from graphs, if nothing may."""
        if self.enforce_eager:
            return Reason.ENFORCE_EAGER
        return None if self.cudagraph_mm_encoder else Reason.DISABLED

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> GraphConfig:
        """Read settings from a JSON object of them; those it lacks have their defaults.

        Raises:
            ConfigError: The file can't be read, or holds no such object, a setting that doesn't
                exist, or a value that is no good. The message names the file.
        """
        try:
            return cls(**_settings_in(Path(path)))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    def to_dict(self) -> dict[str, object]:
        """Return all settings as JSON-ready data, which `from_file` reads."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _settings_in(path: Path) -> dict[str, Any]:
    """The settings in a file, known by name and of the right kinds."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file can't be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"the file is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"settings must be a JSON object, got {data!r:.40}")
    known = {setting.name for setting in fields(GraphConfig)}
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ConfigError(
            f"there is no setting {unknown[0]!r}: GraphConfig has {', '.join(sorted(known))}"
        )
    return data


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


def _check_switch(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < 0:
        raise ConfigError(f"{name} must be 0 (never) or more, got {value}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
