"""A report as a picture: one panel a model, time by size, a line for each variant."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmgraph.bench.results import DEFAULT, EAGER, EXACT, HAND_MADE, LABELS, METADATA, Report, Row

__all__ = ["can_plot", "plot"]

_COLUMNS = 3
_PANEL = (5.2, 3.9)  # inches
_STYLES: dict[str, dict[str, Any]] = {
    EAGER: {"color": "#7f7f7f", "marker": "s"},
    METADATA: {"color": "#b8860b", "marker": "D"},
    HAND_MADE: {"color": "black", "marker": "x", "linestyle": "--", "zorder": 5},
    EXACT: {"color": "#0072b2", "marker": "o"},
    DEFAULT: {"color": "#d55e00", "marker": "^"},
}


def can_plot() -> bool:
    """Whether matplotlib is installed (the extra `mmgraph[bench]`)."""
    return find_spec("matplotlib") is not None


def plot(report: Report, path: Path) -> None:
    """Write the picture to `path`; needs matplotlib."""
    from matplotlib.figure import Figure

    panels = report.by_model
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _PANEL[0], lines * _PANEL[1] + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, (model, rows) in zip(axes, panels.items(), strict=False):
        _draw(axis, model, sorted(rows, key=lambda row: row.tokens))
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _add_legend(figure, axes[: len(panels)])
    figure.suptitle(_title(report), fontsize=11)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, model: str, rows: list[Row]) -> None:
    for name, style in _STYLES.items():
        if name in rows[0].timings:
            times = [row.timings[name].median_ms for row in rows]
            axis.plot(range(len(rows)), times, label=LABELS[name], **style)
    axis.set_title(model)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("ms a call, median")
    axis.set_xticks(range(len(rows)), [f"{row.size}\n{row.tokens}" for row in rows], fontsize=8)
    axis.set_xlabel("images or batch size, and tokens")
    axis.grid(visible=True, which="both", alpha=0.25)


def _add_legend(figure: Any, axes: Any) -> None:
    """One legend for all panels; not every model has every variant."""
    found = [axis.get_legend_handles_labels() for axis in axes]
    lines = {
        label: line
        for handles, labels in found
        for line, label in zip(handles, labels, strict=True)
    }
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))


def _title(report: Report) -> str:
    where = report.environment
    versions = where.versions
    return (
        f"{where.gpu or where.cpu}, {report.dtype}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, mmgraph {versions['mmgraph']}, N = {report.repeats}"
    )
