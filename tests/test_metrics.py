"""Counters for Prometheus: all there, and they add up."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any

import pytest

from mmgraph import ConfigError, EncoderStats, GraphKey, Reason
from mmgraph.metrics import StatsCollector
from mmgraph.stats import GraphRecord

GRAPH = GraphRecord(GraphKey(64), 3, 100, 0.5, 0.25, replay_seconds=1e-3, eager_seconds=3e-3)
STATS = EncoderStats(
    calls=5,
    hits=7,
    misses={Reason.GRAD: 2},
    tokens=90,
    padding=10,
    evictions=4,
    graphs=(GRAPH, GRAPH),
)


class Family:
    """What there is of a family of metrics in prometheus-client."""

    def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
        assert documentation
        self.name, self.labels = name, labels
        self.metrics: list[tuple[tuple[str, ...], float]] = []

    def add_metric(self, labels: list[str], value: float) -> None:
        assert len(labels) == len(self.labels)
        self.metrics.append((tuple(labels), value))


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    package, core = ModuleType("prometheus_client"), ModuleType("prometheus_client.core")
    core.CounterMetricFamily = core.GaugeMetricFamily = Family  # type: ignore[attr-defined]
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", package)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", core)
    stats = {"vision": STATS, "audio": EncoderStats()}
    return {family.name: family for family in StatsCollector(lambda: stats).collect()}


def test_items_are_hits_and_misses_by_reason(families: dict[str, Any]) -> None:
    assert dict(families["mmgraph_items"].metrics) == {("vision",): 9, ("audio",): 0}
    assert dict(families["mmgraph_hits"].metrics)["vision",] == 7
    assert families["mmgraph_misses"].metrics == [(("vision", "GRAD"), 2)]
    assert dict(families["mmgraph_padding_tokens"].metrics)["vision",] == 10
    assert dict(families["mmgraph_evictions"].metrics)["vision",] == 4


def test_graphs_of_one_name_are_one_series(families: dict[str, Any]) -> None:
    assert families["mmgraph_graph_replays"].metrics == [(("vision", "64 tokens"), 6)]
    assert dict(families["mmgraph_graphs"].metrics) == {("vision",): 2, ("audio",): 0}
    assert dict(families["mmgraph_compile_seconds"].metrics)["vision",] == 0.5


def test_what_is_not_timed_has_no_series(families: dict[str, Any]) -> None:
    ((labels, seconds),) = families["mmgraph_saved_seconds"].metrics
    assert labels == ("vision",)
    assert seconds == pytest.approx(2 * 3 * 2e-3)


def test_the_real_registry_takes_them() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(StatsCollector(lambda: {"vision": STATS}))
    text = client.generate_latest(registry).decode()
    assert 'mmgraph_misses_total{encoder="vision",reason="GRAD"} 2.0' in text


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"install mmgraph\[prometheus\]"):
        StatsCollector(dict)
