"""What ``scripts.bench_traces`` found, as totals, ratios and a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BEST", "ratios", "render", "summary"]

BEST = "best of each call"
_USUAL = "usual, our kernels"
_RATIOS = (
    ("mmgraph", BEST),
    (_USUAL, "mmgraph"),
    ("mmgraph, fitted", BEST),
    (_USUAL, "mmgraph, fitted"),
)


def ratios(totals: Mapping[str, float]) -> dict[str, float]:
    """How two ways compare, for those that are compared."""
    return {
        f"{a} / {b}": round(totals[a] / totals[b], 4) for a, b in _RATIOS if {a, b} <= totals.keys()
    }


def summary(traces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What came out of all traces together."""
    numbers = ("calls", "timed_calls", "timed_kinds", "stands_for", "seconds")
    results = list(traces.values())
    totals = {way: sum(r["total_ms"][way] for r in results) for way in results[0]["total_ms"]}
    return {
        **{name: round(sum(r[name] for r in results), 1) for name in numbers},
        "total_ms": {way: round(ms, 3) for way, ms in totals.items()},
        "ratios": ratios(totals),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a page of Markdown."""
    names, compared = list(report["all"]["total_ms"]), list(report["all"]["ratios"])
    lines = [
        f"# Traces on {report['model']}",
        "",
        "Total encoder time in ms, and in brackets relative to eager mode. A kind of call that was "
        "timed stands for those of its sort, frequent or rare, that weren't.",
        "",
        "| trace | calls timed | standing for | " + " | ".join((*names, *compared)) + " |",
        "|" + "---|" * (len(names) + len(compared) + 3),
    ]
    for trace, result in (*report["traces"].items(), ("all", report["all"])):
        totals = result["total_ms"]
        cells = [f"{totals[name]:.1f} ({totals[name] / totals['eager']:.2f})" for name in names]
        cells += [f"{result['ratios'][name]:.3f}" for name in compared]
        share = f"{result['timed_calls']} of {result['calls']} ({result['timed_kinds']} kinds)"
        lines.append(
            f"| {trace} | {share} | {result['stands_for']:g} | " + " | ".join(cells) + " |"
        )
    heads = ("trace", "way", "worst kind, of eager", "padding", "graphs", "MiB", "settling, s")
    lines += ["", f"| {' | '.join(heads)} | items in eager mode |", "|---" * (len(heads) + 1) + "|"]
    for trace, result in report["traces"].items():
        for name, way in result["ways"].items():
            misses = ", ".join(f"{n} {reason}" for reason, n in way["misses"].items()) or "none"
            numbers = (
                f"{way['worst']:.2f} x | {way['padding']:.0%} | {way['graphs']} | "
                f"{way['graph_mib']} | {way['settling_s']}"
            )
            lines.append(f"| {trace} | {name} | {numbers} | {misses} |")
    machine = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += ["", f"{machine['gpu'] or machine['cpu']}; {versions}; commit {machine['commit']}."]
    lines.append(f"\nCommand: `{report['command']}`")
    return "\n".join(lines) + "\n"
