"""Counters of one encoder. Items = hits + misses by reason, always."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from mmgraph.types import GraphKey, Reason

__all__ = ["EncoderStats", "GraphRecord", "StatsRecorder"]


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One captured graph, for reports.

    Attributes:
        key: What it was captured for.
        replays: How often it was replayed.
        num_bytes: Device memory that its capture took from the pool, in bytes.
        capture_seconds: Seconds its warm-up and capture took.
    """

    key: GraphKey
    replays: int
    num_bytes: int
    capture_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderStats:
    """A snapshot of the counters.

    Attributes:
        calls: Calls of the encoder.
        hits: Items served by a replay.
        misses: Items served in eager mode, by reason.
        tokens: Real tokens replayed.
        padding: Tokens replayed that belonged to no item.
        graphs: One record a graph that is held now.
    """

    calls: int = 0
    hits: int = 0
    misses: dict[Reason, int] = field(default_factory=dict)
    tokens: int = 0
    padding: int = 0
    graphs: tuple[GraphRecord, ...] = ()

    @property
    def items(self) -> int:
        """Items seen."""
        return self.hits + sum(self.misses.values())

    @property
    def replays(self) -> int:
        """Replays of the graphs that are held now."""
        return sum(graph.replays for graph in self.graphs)

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs, in bytes."""
        return sum(graph.num_bytes for graph in self.graphs)

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on capturing the graphs that are held now."""
        return sum(graph.capture_seconds for graph in self.graphs)

    def to_dict(self) -> dict[str, object]:
        """Return the snapshot as JSON-ready data."""
        return {
            "calls": self.calls,
            "items": self.items,
            "hits": self.hits,
            "misses": {reason.name: n for reason, n in self.misses.items()},
            "tokens": self.tokens,
            "padding": self.padding,
            "graphs": [
                {
                    "key": str(g.key),
                    "replays": g.replays,
                    "bytes": g.num_bytes,
                    "capture_seconds": round(g.capture_seconds, 4),
                }
                for g in self.graphs
            ],
        }


class StatsRecorder:
    """Counts as calls go by; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero."""
        self._calls = self._hits = self._tokens = self._padding = 0
        self._misses: Counter[Reason] = Counter()
        self._replays: Counter[GraphKey] = Counter()

    def called(self) -> None:
        """Count a call."""
        with self._lock:
            self._calls += 1

    def missed(self, reason: Reason, num_items: int) -> None:
        """Count `num_items` items that ran in eager mode because of `reason`."""
        with self._lock:
            self._misses[reason] += num_items

    def replayed(self, key: GraphKey, num_items: int, num_tokens: int) -> None:
        """Count a replay of `key` that served `num_items` items of `num_tokens` tokens in all."""
        with self._lock:
            self._hits += num_items
            self._tokens += num_tokens
            self._padding += key.token_budget - num_tokens
            self._replays[key] += 1

    def forget(self, keys: list[GraphKey]) -> None:
        """Drop the replay counts of graphs that are gone."""
        with self._lock:
            for key in keys:
                self._replays.pop(key, None)

    def replays(self, key: GraphKey) -> int:
        """How often the graph of `key` was replayed."""
        return self._replays[key]

    def snapshot(self, graphs: tuple[GraphRecord, ...] = ()) -> EncoderStats:
        """Return the counters as they are now."""
        with self._lock:
            return EncoderStats(
                calls=self._calls,
                hits=self._hits,
                misses={reason: n for reason, n in self._misses.items() if n},
                tokens=self._tokens,
                padding=self._padding,
                graphs=graphs,
            )
