"""What fresh graphs have to answer, and that eager mode answers each of it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mmgraph import EncoderFacts, GraphKey
from mmgraph.manager.probes import Probe, Probes, _equal
from mmgraph.manager.store import GraphStore
from tests.manager.engine import EngineEncoder, MeasuredBackend, call_of, make_manager


class Timed(MeasuredBackend):
    is_timed = True


class Probed(EngineEncoder):
    """Has all its graphs answer the same two calls, or calls of their own."""

    same = True

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            tokens = 4 if self.same else key.token_budget
            return [call_of([tokens], 1), call_of([tokens], 2)]

        return dataclasses.replace(super().encoder_facts(), probes=probes)


class OwnProbes(Probed):
    same = False


def probes_of(encoder: Probed, backend: MeasuredBackend | None = None) -> Probes:
    return Probes(encoder, encoder.encoder_facts(), backend or MeasuredBackend())


KEY = GraphKey(8, (2,), (8,), None)


def test_equal_probes_are_answered_once_while_they_are_remembered() -> None:
    encoder = Probed().requires_grad_(False).eval()
    probes = probes_of(encoder)
    with probes.remembered():
        answers = [probe.answer() for _ in range(3) for probe in probes.of(KEY)]
    assert encoder.eager_calls == [[4], [4]]
    assert answers[0] is answers[2] is answers[4]
    assert not torch.equal(answers[0][0], answers[1][0])  # contents tell them apart


def test_calls_may_hold_anything() -> None:
    def of(**more: Any) -> dict[str, Any]:
        return {"sizes": [(1, 2), torch.ones(2)], "table": np.arange(2), "names": {"a": 1}, **more}

    same = {"table": 0}
    assert _equal(of(**same), of(**same))
    for other in ({"sizes": [(1, 2), torch.zeros(2)]}, {"sizes": [(1, 2)]}, {"names": {"a": 1.0}}):
        assert not _equal(of(**same), of(**same, **other))
    assert not _equal(of(), of())  # of an array nothing is known


def test_nothing_is_kept_afterwards() -> None:
    encoder = Probed().requires_grad_(False).eval()
    probes = probes_of(encoder)

    def interrupted() -> None:
        with probes.remembered():
            with probes.remembered():
                seen.append(probes.of(KEY)[0])
            assert probes.of(KEY)[0] is seen[0]  # the outer block goes on
            raise KeyboardInterrupt

    seen: list[Probe] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (first,) = seen
    assert probes.of(KEY)[0] is not first
    assert probes.of(KEY)[0] is not probes.of(KEY)[0]


def test_only_the_last_few_are_kept() -> None:
    probes = probes_of(OwnProbes())
    with probes.remembered():
        first = probes.of(KEY)[0]
        for tokens in (16, 32):
            probes.of(dataclasses.replace(KEY, token_budget=tokens))
        assert probes.of(KEY)[0] is not first


@pytest.mark.parametrize("own", [False, True])
def test_a_capture_up_front_asks_eager_mode_once_for_each_probe(own: bool) -> None:
    encoder = (OwnProbes() if own else Probed()).requires_grad_(False).eval()
    manager = make_manager(encoder, max_items=1)
    manager.capture()
    graphs = len(manager.stats().graphs)
    assert graphs == 3
    assert len(encoder.eager_calls) == (2 * graphs if own else 2)


@pytest.mark.parametrize(("replay", "timed"), [(1e-9, 0), (1e3, 3)])
def test_eager_mode_is_timed_again_only_where_its_price_matters(
    replay: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shortest(_: Any, run: Any) -> float:
        runs.append(run.keywords["lengths"].tolist())
        return 1e6

    runs: list[list[int]] = []
    monkeypatch.setattr("mmgraph.manager.eager_times.shortest", shortest)
    monkeypatch.setattr(GraphStore, "seconds", lambda *_: replay)
    manager = make_manager(OwnProbes().requires_grad_(False).eval(), Timed(), max_items=1)
    manager.capture()
    smallest, *others = runs  # what any call costs has no graph that it could be compared with
    assert smallest == [4]
    assert len(others) == timed
    (seconds,) = manager._store.eager_times.seconds.values()
    assert {8, 16, 32} <= seconds.keys()
    assert all(seconds[tokens] > 0 for tokens in (8, 16, 32))
