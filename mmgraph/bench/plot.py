"""A report as a picture: one panel a model, time by size, a line for each variant."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmgraph.bench.names import (
    BOUND,
    COMPILE,
    COMPILE_MAX_AUTOTUNE,
    COMPILE_REDUCE_OVERHEAD,
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    LABELS,
    METADATA,
    POWER_OF_TWO,
)
from mmgraph.bench.results import Report, Row

__all__ = ["can_plot", "plot"]

_COLUMNS = 3
_LEGEND_COLUMNS = 5
_PANEL = (5.2, 3.9)  # inches
_TITLE_VERSIONS = ("torch", "transformers", "mmgraph")
_STYLES: dict[str, dict[str, Any]] = {
    EAGER: {"color": "#7f7f7f", "marker": "s"},
    METADATA: {"color": "#b8860b", "marker": "D"},
    COMPILE: {"color": "#cc79a7", "marker": "v"},
    COMPILE_REDUCE_OVERHEAD: {"color": "#cc79a7", "marker": "<", "linestyle": "--"},
    COMPILE_MAX_AUTOTUNE: {"color": "#cc79a7", "marker": ">", "linestyle": ":"},
    POWER_OF_TWO: {"color": "#009e73", "marker": "P"},
    HAND_MADE: {"color": "black", "marker": "x", "linestyle": "--", "zorder": 5},
    EXACT: {"color": "#0072b2", "marker": "o"},
    DEFAULT: {"color": "#d55e00", "marker": "^"},
    BOUND: {"color": "black", "linestyle": ":", "zorder": 0},
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
        times = {
            i: row.timings[name].median_ms for i, row in enumerate(rows) if name in row.timings
        }
        if times:
            axis.plot(list(times), list(times.values()), label=LABELS[name], **style)
    axis.set_title(model)
    axis.set_yscale("log")
    _label_milliseconds(axis, [t.median_ms for row in rows for t in row.timings.values()])
    axis.set_ylabel("ms a call, median")
    axis.set_xticks(range(len(rows)), [f"{row.size}\n{row.tokens}" for row in rows], fontsize=8)
    axis.set_xlabel("images or batch size, and tokens")
    axis.grid(visible=True, alpha=0.25)


def _label_milliseconds(axis: Any, times: list[float]) -> None:
    """Plain numbers at 1, 2 and 5 of each decade, and room for at least one of them."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_ylim(min(times) / 1.6, max(times) * 1.6)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


def _add_legend(figure: Any, axes: Any) -> None:
    """One legend for all panels; not every model has every variant."""
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    labels = [label for label in LABELS.values() if label in lines]
    handles = [lines[label] for label in labels]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), _LEGEND_COLUMNS)
    )


def _title(report: Report) -> str:
    where = report.environment
    versions = ", ".join(f"{name} {where.versions[name]}" for name in _TITLE_VERSIONS)
    return f"{where.gpu or where.cpu}, {report.dtype}, {versions}, N = {report.repeats}"
