"""``mmgraph plan``: read a trace, fit a ladder to it, show what it saves, write a config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmgraph.config import GraphConfig
from mmgraph.errors import ConfigError
from mmgraph.plan.trace import Trace, read_trace
from mmgraph.policy import Expectation, LinearCost, as_replays, expect, fit, ladder

__all__ = ["add_arguments", "main"]

_BUDGETS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mmgraph plan``."""
    add = parser.add_argument
    add(
        "trace",
        type=Path,
        metavar="TRACE",
        help="what handle.stats().save(TRACE) wrote, or sizes of calls in tokens, one a line",
    )
    add("--budgets", type=_positive, default=_BUDGETS, metavar="K", help="at most; default: 16")
    add("--out", type=Path, metavar="FILE", help="write a config for GraphConfig.from_file there")
    add("--largest", type=_positive, metavar="N", help="no budget above N tokens; default: any")
    add(
        "--granularity",
        type=_positive,
        default=1,
        metavar="N",
        help="budgets are multiples of N tokens; default: 1, since observed sizes are already",
    )
    add(
        "--overhead",
        type=_count,
        default=256,
        metavar="N",
        help="fixed cost of a replay, in the time of N tokens; default: 256",
    )
    add(
        "--eager-overhead",
        type=_count,
        default=4096,
        metavar="N",
        help="the same of a call in eager mode; default: 4096",
    )


def main(namespace: argparse.Namespace) -> int:
    """Print today's ladder beside the fitted one, and write the config; 0.

    Raises:
        ConfigError: The trace can't be read, no budget fits it, or the file can't be written.
    """
    trace = read_trace(namespace.trace)
    replay, eager = LinearCost(namespace.overhead), LinearCost(namespace.eager_overhead)
    granularity = namespace.granularity
    largest = _largest(trace, namespace.largest, granularity)
    sizes = as_replays(trace.calls, trace.items, largest)
    budgets = fit(
        sizes,
        namespace.budgets,
        granularity=granularity,
        largest=largest,
        replay=replay,
        eager=eager,
    )
    if not budgets:
        raise ConfigError(
            f"no budget of up to {largest} tokens is worth a graph for {namespace.trace}: every "
            "size is above it, or eager mode costs no more"
        )
    today = trace.budgets or ladder(min(sizes), max(sizes), _BUDGETS, granularity)
    ladders = {"today" if trace.budgets else "default": today, "fitted": budgets}
    print(_render(sizes, ladders, replay, eager))
    if namespace.out is not None:
        _write(budgets, namespace.out)
        print(f"\nGraphConfig.from_file({str(namespace.out)!r}) takes them.")
    return 0


def _largest(trace: Trace, asked: int | None, granularity: int) -> int:
    """The largest budget to allow: as asked, or one that holds every item."""
    if asked is None:
        needed = max((*(trace.items or trace.calls), *trace.budgets))
        return -(-needed // granularity) * granularity
    if asked < granularity:
        raise ConfigError(f"--largest {asked} holds no multiple of --granularity {granularity}")
    return asked // granularity * granularity


def _render(
    sizes: Mapping[int, int],
    ladders: Mapping[str, Sequence[int]],
    replay: LinearCost,
    eager: LinearCost,
) -> str:
    results = {
        name: expect(sizes, budgets, replay=replay, eager=eager)
        for name, budgets in ladders.items()
    }
    before, *_ = results.values()
    rows = [["ladder", "budgets", "padding", "cost", "above the largest"]]
    rows += [
        [name, str(len(ladders[name])), *_cells(result, before)] for name, result in results.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    listed = [f"{name}: {', '.join(map(str, budgets))}" for name, budgets in ladders.items()]
    head = f"{before.calls} replays of {len(sizes)} sizes, {min(sizes)} to {max(sizes)} tokens"
    return "\n".join([head, "", *table, "", *listed])


def _cells(result: Expectation, before: Expectation) -> list[str]:
    ratio = result.cost / before.cost if before.cost else 1.0
    return [
        f"{100 * result.padding:.1f} %",
        f"{ratio:.3f} x",
        f"{100 * result.share_above:.1f} %",
    ]


def _write(budgets: tuple[int, ...], path: Path) -> None:
    chosen: dict[str, object] = {"token_budgets": list(budgets)}
    if budgets[-1] < GraphConfig().max_items:
        chosen["max_items"] = budgets[-1]
    try:
        path.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: the file can't be written ({error.strerror})") from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)
