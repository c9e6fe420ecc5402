"""What fresh graphs have to answer, and that eager mode answers each of it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mmgraph import CaptureError, EncoderFacts, GraphKey
from mmgraph.manager.outputs import eager_tensors
from mmgraph.manager.probes import Probe, Probes, _equal
from mmgraph.manager.store import GraphStore
from mmgraph.types import ProbeCall
from tests.manager.engine import BUDGETS, EngineEncoder, MeasuredBackend, call_of, make_manager


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


class Named(EngineEncoder):
    """Has its graphs answer one item of 8 tokens, and two of 4.

    Attributes:
        mixes: Whether items of one call, against the rules, see each other.
        mixes_in_eager_mode: Likewise.
        memory: What eager mode gives its answers in, if it is always the same.
    """

    mixes = mixes_in_eager_mode = False
    memory: torch.Tensor | None = None

    def encoder_facts(self) -> EncoderFacts:
        def probes(key: GraphKey) -> Sequence[Mapping[str, Any]]:
            items = range(min(2, key.segment_capacity[0]))
            fours = call_of([4 for _ in items])
            fours["patches"] = torch.cat([call_of([4], seed)["patches"] for seed in items])
            return [
                ProbeCall(call_of([8], 9), ["eight"]),
                ProbeCall(fours, [("four", seed) for seed in items]),
            ]

        return dataclasses.replace(super().encoder_facts(), probes=probes)

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        return self._mixed(super().encoder_forward(buffers, key), buffers["patches"])

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        outputs = super().embed_multimodal(**mm_kwargs)
        if self.mixes_in_eager_mode:
            outputs = [output + mm_kwargs["patches"].abs().mean() for output in outputs]
        outputs = [self._mixed(output, mm_kwargs["patches"]) for output in outputs]
        if self.memory is None:
            return outputs
        rows = sum(output.shape[0] for output in outputs)
        together = self.memory[:rows].copy_(torch.cat(outputs))
        return list(together.split([output.shape[0] for output in outputs]))

    def _mixed(self, output: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        return output + patches.abs().mean() if self.mixes else output


def test_named_items_are_answered_once_where_there_are_many_graphs() -> None:
    encoder = Named().requires_grad_(False).eval()
    manager = make_manager(encoder, max_items=2)
    manager.capture()
    assert len(manager.stats().graphs) == 2 * len(BUDGETS)
    # Two together once, to see that it makes no difference.
    assert encoder.eager_calls == [[8], [4], [4, 4], [4]]
    assert not manager._store.probes._named
    assert not manager._store.probes._alone


def test_a_graph_by_itself_is_checked_with_whole_calls() -> None:
    encoder = Named().requires_grad_(False).eval()
    manager = make_manager(encoder)
    manager.execute(call_of([6, 2]))
    assert encoder.eager_calls == [[8], [4, 4]]
    assert manager.stats().hits == 2


def test_a_graph_whose_items_see_each_other_is_refused() -> None:
    encoder = Named().requires_grad_(False).eval()
    encoder.mixes = True
    with pytest.raises(CaptureError, match="differs from eager mode"):
        make_manager(encoder, max_items=2).capture()


def test_eager_mode_whose_items_see_each_other_is_asked_about_whole_calls() -> None:
    """A graph that treats each by itself isn't what eager mode gives."""
    encoder = Named().requires_grad_(False).eval()
    probes = probes_of(encoder)
    manager = make_manager(Named().requires_grad_(False).eval(), max_items=2)
    manager.capture()
    facts = encoder.encoder_facts()

    def flat(output: Any) -> list[torch.Tensor]:
        return eager_tensors(output, facts, entry.layout)

    entry = next(e for k, e in manager._store.entries.items() if k.segment_capacity[0] > 1)
    with probes.remembered(for_many=True):
        for encoder.mixes_in_eager_mode in (False, True):
            probes._alone.clear()
            probes._named.clear()
            two = probes.of(KEY)[1]
            answer = torch.cat(list(two.tensors(flat, entry.layout)))
            whole = torch.cat(encoder.embed_multimodal(**two.call))
            torch.testing.assert_close(answer, whole)
            assert list(probes._alone.values()) == [not encoder.mixes_in_eager_mode]


def test_answers_that_lie_in_the_same_memory_are_kept_apart() -> None:
    encoder = Named().requires_grad_(False).eval()
    width = encoder.embed_multimodal(**call_of([4]))[0].shape[1]
    encoder.memory = torch.empty(64, width)
    manager = make_manager(encoder, max_items=2)
    manager.capture()
    assert len(manager.stats().graphs) == 2 * len(BUDGETS)


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    class Twice(Named):
        def embed_multimodal(self, **mm_kwargs: Any) -> Any:
            (output,) = super().embed_multimodal(**mm_kwargs)
            return {"first": output, "all": (output, output + 1)}

    probes = probes_of(Twice().requires_grad_(False).eval())
    with probes.remembered(for_many=True):
        answer = probes.of(KEY)[0].answer()
    assert answer["first"] is answer["all"][0]
    assert answer["first"] is not answer["all"][1]


def test_only_so_many_names_are_kept() -> None:
    probes = probes_of(Named())
    calls = [ProbeCall(call_of([4], seed), [seed]) for seed in range(40)]
    with probes.remembered(for_many=True):
        first, second = (probes._probe(call, None) for call in calls[:2])
        for call in calls[2:]:
            probes._probe(call, None)
            assert probes._probe(calls[0], None) is first  # what is asked for stays
        assert probes._probe(calls[1], None) is not second
    assert probes._probe(calls[0], None) is not first
