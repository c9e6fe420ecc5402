"""``mmgraph bench``: measure, print the table, write the files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmgraph.bench.options import BenchOptions, add_arguments
from mmgraph.bench.plot import can_plot, plot
from mmgraph.bench.results import Report, Row
from mmgraph.bench.run import run
from mmgraph.bench.table import render_markdown, summarize
from mmgraph.errors import ConfigError

__all__ = ["add_arguments", "main"]


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an output doesn't match or a call wasn't replayed, else 0.

    Raises:
        ConfigError: An option can't be used.
    """
    options = BenchOptions.resolve(namespace)
    if namespace.out is not None:
        _prepare(namespace.out)
    report = run(options, namespace.command_line, on_row=_follow)
    print(render_markdown(report))
    if namespace.out is not None:
        _write(report, namespace.out)
    return 0 if report.ok else 1


def _follow(row: Row) -> None:
    print(summarize(row), file=sys.stderr, flush=True)


def _prepare(folder: Path) -> None:
    """Complain about the folder and the plot before minutes of measuring, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: no such folder can be made ({error.strerror})"
        ) from None
    if not can_plot():
        print(
            "there will be no bench.png: matplotlib is missing, pip install 'mmgraph[bench]'",
            file=sys.stderr,
        )


def _write(report: Report, folder: Path) -> None:
    data = folder / "bench.json"
    data.write_text(report.to_json(), encoding="utf-8")
    written = Report.from_json(data.read_text(encoding="utf-8"))  # the others show what it says
    (folder / "bench.md").write_text(render_markdown(written), encoding="utf-8")
    if can_plot():
        plot(written, folder / "bench.png")
