"""Counters of one encoder. Items = hits + misses by reason, always."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from mmgraph.types import GraphKey, Reason

__all__ = ["EncoderStats", "GraphRecord", "Histogram", "StatsRecorder"]

_PENDING_CALLS = 64
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One captured graph, for reports.

    Attributes:
        key: What it was captured for.
        replays: How often it was replayed.
        num_bytes: Device memory that its capture took from the pool, in bytes.
        capture_seconds: Seconds its warm-up and capture took.
        compile_seconds: Seconds of these that compiling blocks took, as far as that is known.
        replay_seconds: Seconds of a replay, where that is measured.
        eager_seconds: Seconds in eager mode of what a replay served on average, likewise.
    """

    key: GraphKey
    replays: int
    num_bytes: int
    capture_seconds: float
    compile_seconds: float = 0.0
    replay_seconds: float | None = None
    eager_seconds: float | None = None

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that its replays saved by estimate; ``None`` where nothing is timed."""
        if self.replay_seconds is None or self.eager_seconds is None:
            return None
        return 1e3 * self.replays * (self.eager_seconds - self.replay_seconds)

    def to_dict(self) -> dict[str, object]:
        """Return the record as JSON-ready data."""
        timed: dict[str, object] = {}
        if self.compile_seconds:
            timed["compile_seconds"] = round(self.compile_seconds, 4)
        if self.replay_seconds is not None:
            timed["replay_ms"] = round(1e3 * self.replay_seconds, 4)
        if self.saved_ms is not None:
            timed["saved_ms"] = round(self.saved_ms, 3)
        return {
            "key": str(self.key),
            "replays": self.replays,
            "bytes": self.num_bytes,
            "capture_seconds": round(self.capture_seconds, 4),
            **timed,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderStats:
    """A snapshot of the counters.

    Attributes:
        calls: Calls of the encoder.
        hits: Items served by a replay.
        misses: Items served in eager mode, by reason.
        replays: Replays, also of graphs that are gone.
        tokens: Real tokens replayed.
        padding: Tokens replayed that belonged to no item.
        evictions: Graphs that were freed to make room for others, or by an attempt that left none.
        graphs: One record a graph that is held now.
        call_sizes: Calls by the tokens of all their items, as far as sizes could be read; where
            there are very many sizes, close ones are counted as the larger.
        item_sizes: Items by their tokens, likewise.
        budgets: Budgets of the encoder now, ascending, in tokens.
    """

    calls: int = 0
    hits: int = 0
    misses: dict[Reason, int] = field(default_factory=dict)
    replays: int = 0
    tokens: int = 0
    padding: int = 0
    evictions: int = 0
    graphs: tuple[GraphRecord, ...] = ()
    call_sizes: dict[int, int] = field(default_factory=dict)
    item_sizes: dict[int, int] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()

    @classmethod
    def of_all(cls, parts: Iterable[EncoderStats]) -> EncoderStats:
        """Return the counters of several encoders together."""
        parts = tuple(parts)
        return cls(
            calls=sum(p.calls for p in parts),
            hits=sum(p.hits for p in parts),
            misses=_sum(p.misses for p in parts),
            replays=sum(p.replays for p in parts),
            tokens=sum(p.tokens for p in parts),
            padding=sum(p.padding for p in parts),
            evictions=sum(p.evictions for p in parts),
            graphs=tuple(graph for p in parts for graph in p.graphs),
            call_sizes=_sum(p.call_sizes for p in parts),
            item_sizes=_sum(p.item_sizes for p in parts),
            budgets=tuple(sorted({budget for p in parts for budget in p.budgets})),
        )

    @property
    def items(self) -> int:
        """Items seen."""
        return self.hits + sum(self.misses.values())

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs, in bytes."""
        return sum(graph.num_bytes for graph in self.graphs)

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on capturing the graphs that are held now."""
        return sum(graph.capture_seconds for graph in self.graphs)

    @property
    def compile_seconds(self) -> float:
        """Seconds of these that compiling blocks took, as far as that is known."""
        return sum(graph.compile_seconds for graph in self.graphs)

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that graphs held now saved by estimate; ``None`` where nothing is timed."""
        timed = [graph.saved_ms for graph in self.graphs if graph.saved_ms is not None]
        return sum(timed) if timed else None

    def to_dict(self) -> dict[str, object]:
        """Return the snapshot as JSON-ready data."""
        return {
            "calls": self.calls,
            "items": self.items,
            "hits": self.hits,
            "misses": {reason.name: n for reason, n in self.misses.items()},
            "replays": self.replays,
            "tokens": self.tokens,
            "padding": self.padding,
            "evictions": self.evictions,
            "graphs": [graph.to_dict() for graph in self.graphs],
            "call_sizes": _by_text(self.call_sizes),
            "item_sizes": _by_text(self.item_sizes),
            "budgets": list(self.budgets),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot as JSON, which ``mmgraph plan`` reads.

        Raises:
            OSError: The file can't be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


class Histogram:
    """Counts by size, of a bounded number of sizes: beyond it the closest ones become one.

    Sizes that become one are counted as the larger, so that a budget for it serves both, and every
    size listed was seen. No count is lost.

    Args:
        limit: Sizes to tell apart, at least 2.
    """

    def __init__(self, limit: int = 512) -> None:
        self.counts: dict[int, int] = {}
        self._limit = limit

    def add(self, size: int, count: int = 1) -> None:
        """Count `size` `count` times more."""
        self.counts[size] = self.counts.get(size, 0) + count
        if len(self.counts) > self._limit:
            self._merge()

    def _merge(self) -> None:
        """Make one of the pairs of neighbours that this pads least, until a quarter is free."""
        sizes = sorted(self.counts)
        padding = [self.counts[a] * (b - a) for a, b in pairwise(sizes)]
        surplus = len(sizes) - self._limit * 3 // 4
        merged: set[int] = set()
        for i in sorted(range(len(padding)), key=padding.__getitem__):
            if len(merged) >= surplus:
                break
            if not {i - 1, i, i + 1} & merged:  # none moves twice at a time
                merged.add(i)
        for i in merged:
            self.counts[sizes[i + 1]] += self.counts.pop(sizes[i])


class StatsRecorder:
    """Counts as calls go by; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero."""
        self._calls = self._hits = self._num_replays = self._tokens = self._padding = 0
        self._evictions = 0
        self._misses: Counter[Reason] = Counter()
        self._replays: Counter[GraphKey] = Counter()
        self._tokens_by_key: Counter[GraphKey] = Counter()
        self._call_sizes, self._item_sizes = Histogram(), Histogram()
        self._pending: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def called(self) -> None:
        """Count a call."""
        with self._lock:
            self._calls += 1

    def seen(self, sizes: tuple[int, ...]) -> None:
        """Count a call of items of `sizes` tokens: one addition, sorted into bins later."""
        with self._lock:
            self._pending[sizes] += 1
            if len(self._pending) > _PENDING_CALLS:
                self._sort_pending()

    def missed(self, reason: Reason, num_items: int) -> None:
        """Count `num_items` items that ran in eager mode because of `reason`."""
        with self._lock:
            self._misses[reason] += num_items

    def replayed(self, key: GraphKey, num_items: int, num_tokens: int) -> None:
        """Count a replay of `key` that served `num_items` items of `num_tokens` tokens in all."""
        with self._lock:
            self._hits += num_items
            self._num_replays += 1
            self._tokens += num_tokens
            self._padding += key.token_budget - num_tokens
            self._replays[key] += 1
            self._tokens_by_key[key] += num_tokens

    def evicted(self, num_graphs: int) -> None:
        """Count `num_graphs` graphs that are freed to make room for others."""
        with self._lock:
            self._evictions += num_graphs

    def forget(self, keys: list[GraphKey]) -> None:
        """Drop the replay counts of graphs that are gone."""
        with self._lock:
            for key in keys:
                self._replays.pop(key, None)
                self._tokens_by_key.pop(key, None)

    def replays(self, key: GraphKey) -> int:
        """How often the graph of `key` was replayed."""
        return self._replays[key]

    def tokens_per_replay(self, key: GraphKey) -> int:
        """Real tokens that a replay of `key` served on average; those of its budget before any."""
        replays = self._replays[key]
        return self._tokens_by_key[key] // replays if replays else key.token_budget

    def snapshot(
        self, graphs: tuple[GraphRecord, ...] = (), budgets: tuple[int, ...] = ()
    ) -> EncoderStats:
        """Return the counters as they are now."""
        with self._lock:
            self._sort_pending()
            return EncoderStats(
                calls=self._calls,
                hits=self._hits,
                misses={reason: n for reason, n in self._misses.items() if n},
                replays=self._num_replays,
                tokens=self._tokens,
                padding=self._padding,
                evictions=self._evictions,
                graphs=graphs,
                call_sizes=dict(sorted(self._call_sizes.counts.items())),
                item_sizes=dict(sorted(self._item_sizes.counts.items())),
                budgets=budgets,
            )

    def _sort_pending(self) -> None:
        for sizes, count in self._pending.items():
            self._call_sizes.add(sum(sizes), count)
            for size, number in Counter(sizes).items():
                self._item_sizes.add(size, number * count)
        self._pending.clear()


def _sum(parts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    total: Counter[_Key] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _by_text(counts: Mapping[int, int]) -> dict[str, int]:
    """The same with keys that JSON has."""
    return {str(size): count for size, count in counts.items()}
