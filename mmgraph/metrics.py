"""Counters for Prometheus; needs ``pip install mmgraph[prometheus]``.

from prometheus_client import REGISTRY
REGISTRY.register(StatsCollector(handle.stats_by_tower))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mmgraph.errors import ConfigError
from mmgraph.stats import EncoderStats, GraphRecord

__all__ = ["StatsCollector"]

_COUNTERS: dict[str, tuple[str, Callable[[EncoderStats], float]]] = {
    "mmgraph_calls": ("Calls of the encoder", lambda s: s.calls),
    "mmgraph_items": ("Items seen: hits and misses", lambda s: s.items),
    "mmgraph_hits": ("Items served by a replay", lambda s: s.hits),
    "mmgraph_replays": ("Replays, also of graphs that are gone", lambda s: s.replays),
    "mmgraph_tokens": ("Real tokens replayed", lambda s: s.tokens),
    "mmgraph_padding_tokens": ("Tokens replayed that belonged to no item", lambda s: s.padding),
    "mmgraph_evictions": ("Graphs freed to make room for others", lambda s: s.evictions),
}
_GAUGES: dict[str, tuple[str, Callable[[EncoderStats], float | None]]] = {
    "mmgraph_graphs": ("Graphs held now", lambda s: len(s.graphs)),
    "mmgraph_graph_bytes": ("Device memory of graphs held now", lambda s: s.graph_bytes),
    "mmgraph_capture_seconds": ("Spent on capturing them", lambda s: s.capture_seconds),
    "mmgraph_compile_seconds": ("Of these on compiling blocks", lambda s: s.compile_seconds),
    "mmgraph_saved_seconds": (
        "That they saved over eager mode, by estimate",
        lambda s: None if s.saved_ms is None else 1e-3 * s.saved_ms,
    ),
}
_BY_GRAPH: dict[str, tuple[str, Callable[[GraphRecord], float | None]]] = {
    "mmgraph_graph_replays": ("Replays of a graph held now", lambda g: g.replays),
    "mmgraph_graph_memory_bytes": ("Device memory of a graph", lambda g: g.num_bytes),
    "mmgraph_replay_seconds": ("What a replay takes", lambda g: g.replay_seconds),
}


class StatsCollector:
    """Reads the counters when Prometheus asks for them.

    Args:
        stats: Gives the counters of each encoder by name, as ``handle.stats_by_tower`` does.

    Raises:
        ConfigError: The package prometheus-client isn't installed.
    """

    def __init__(self, stats: Callable[[], Mapping[str, EncoderStats]]) -> None:
        self._stats = stats
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError(
                "StatsCollector needs the package prometheus-client: install mmgraph[prometheus]"
            ) from error
        self._core: Any = core

    def collect(self) -> Iterator[Any]:
        """One family of metrics after the other, as ``CollectorRegistry`` wants them."""
        stats = dict(self._stats())
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        for name, (text, value) in _COUNTERS.items():
            yield _filled(counter(name, text, labels=["encoder"]), stats, value)
        for name, (text, read) in _GAUGES.items():
            yield _filled(gauge(name, text, labels=["encoder"]), stats, read)
        misses = counter("mmgraph_misses", "Items in eager mode", labels=["encoder", "reason"])
        for encoder, of_encoder in stats.items():
            for reason, items in of_encoder.misses.items():
                misses.add_metric([encoder, reason.name], items)
        yield misses
        for name, (text, of_graph) in _BY_GRAPH.items():
            family = gauge(name, text, labels=["encoder", "graph"])
            for encoder, of_encoder in stats.items():
                # Signatures aren't part of a name: graphs that differ in nothing else are added.
                totals: dict[str, float] = {}
                for graph in of_encoder.graphs:
                    number = of_graph(graph)
                    if number is not None:
                        totals[str(graph.key)] = totals.get(str(graph.key), 0.0) + number
                for key, total in totals.items():
                    family.add_metric([encoder, key], total)
            yield family


def _filled(
    family: Any,
    stats: Mapping[str, EncoderStats],
    value: Callable[[EncoderStats], float | None],
) -> Any:
    for encoder, of_encoder in stats.items():
        number = value(of_encoder)
        if number is not None:
            family.add_metric([encoder], number)
    return family
