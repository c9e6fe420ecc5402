"""The report of a handle, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmgraph.stats import EncoderStats

__all__ = ["render_report"]


def render_report(
    model_name: str, stats: Mapping[str, EncoderStats], prepared: Mapping[str, Sequence[str]]
) -> str:
    """Return a few lines a tower: what was served how, what it cost, and how it was prepared."""
    lines = [f"mmgraph on {model_name}"]
    for name, s in stats.items():
        lines += ["", f"{name}: {s.calls} calls, {s.items} items"]
        lines.append(f"  replayed  {s.hits} items in {s.replays} replays{_padding(s)}")
        lines += [f"  eager     {n} items: {reason.value}" for reason, n in s.misses.items()]
        lines += [f"  prepared  {line}" for line in prepared.get(name, ())]
        if s.graphs:
            lines.append(
                f"  graphs    {len(s.graphs)}, {s.graph_bytes / 2**20:.1f} MiB, "
                f"captured in {s.capture_seconds:.1f} s{_saved(s.saved_ms)}{_evicted(s)}"
            )
        for graph in sorted(s.graphs, key=lambda g: g.key.token_budget):
            lines.append(
                f"    {graph.key}: {graph.replays} replays, {graph.num_bytes / 2**20:.1f} MiB"
                f"{_saved(graph.saved_ms)}"
            )
    return "\n".join(lines)


def _saved(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f", {milliseconds:.0f} ms saved"


def _evicted(stats: EncoderStats) -> str:
    return f", {stats.evictions} freed for others" if stats.evictions else ""


def _padding(stats: EncoderStats) -> str:
    total = stats.tokens + stats.padding
    return "" if not total else f", {100 * stats.padding / total:.0f} % of {total} tokens padding"
