"""``mmgraph bench``: measure, print the table, write the files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mmgraph.bench.files import write_report
from mmgraph.bench.options import BenchOptions, add_arguments
from mmgraph.bench.plot import can_plot, plot
from mmgraph.bench.results import Report
from mmgraph.bench.run import run
from mmgraph.bench.table import render_markdown, summarize
from mmgraph.errors import ConfigError

__all__ = ["add_arguments", "main"]


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark; 1 if an output doesn't match or a call wasn't replayed, else 0.

    Raises:
        ConfigError: An option can't be used.
    """
    options, folder = BenchOptions.resolve(namespace), namespace.out
    if folder is not None:
        _prepare(folder)

    def save(report: Report) -> None:
        if folder is not None:
            write_report(report, folder)

    def follow(report: Report) -> None:
        print(summarize(report.rows[-1]), file=sys.stderr, flush=True)
        save(report)

    report = run(options, namespace.command_line, on_row=follow)
    print(render_markdown(report))
    save(report)
    if folder is not None and can_plot():
        plot(report, folder / "bench.png")
    return 0 if report.ok else 1


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
