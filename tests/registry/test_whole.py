"""The whole form of the contract for every encoder: minutes, so `make test-all` runs it.

On CUDA with ``-m "gpu and slow"``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from mmgraph import Handle, attach
from mmgraph.attachment.wrap import rehearsal
from mmgraph.encoders import eager_towers
from tests.registry.build import Absent, why_eager
from tests.registry.entries.all import ENTRIES
from tests.registry.entry import Entry, Size
from tests.registry.outcome import Outcome, difference, tensors
from tests.registry.subject import Subject, Subjects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="module",
    params=[entry for entry in ENTRIES if not why_eager(entry)],
    ids=lambda entry: entry.name,
)
def subject(request: pytest.FixtureRequest, device: str, subjects: Subjects) -> Subject:
    entry: Entry = request.param
    try:
        return subjects.get(entry, device)
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def divisions(subject: Subject) -> list[Sequence[Size]]:
    """One item, two alike, several, the other way round, more than a graph holds, one again."""
    mixed = subject.entry.inputs.mixed
    first = mixed[:1]
    return [first, first * 2, mixed, mixed[::-1], mixed + first * subject.entry.budget, first]


def judged(subject: Subject, calls: Sequence[Sequence[Size]]) -> Outcome:
    outcome = Outcome(subject.entry.modality, subject.entry.inputs.kind)
    for sizes in calls:
        call = subject.call(sizes)
        output = subject.run(call)
        outcome.blame(f"{len(sizes)} items", output, subject.eager(call), subject.truth(call))
    return outcome


def test_every_division_of_a_call_equals_eager(subject: Subject) -> None:
    with subject.attach() as handle:
        assert not judged(subject, divisions(subject) * 2).judge()
        assert subject.stats(handle).hits > 0


def test_graphs_of_exact_calls_equal_eager(subject: Subject) -> None:
    config = dataclasses.replace(subject.config, mode="piecewise")
    several = subject.entry.inputs.mixed
    with attach(subject.model, config) as handle:
        assert not judged(subject, [several, several[:1], several, several[:1], several]).judge()
        assert subject.stats(handle).hits > 0, handle.report()
        assert all(graph.key.exact is not None for graph in subject.stats(handle).graphs)


def test_outputs_belong_to_the_caller(subject: Subject) -> None:
    sizes = subject.entry.inputs.mixed
    with subject.attach():
        for _ in range(2):
            kept = subject.run(subject.call(sizes))
        copies = [t.clone() for t in tensors(kept)]
        for t in tensors(subject.run(subject.call(sizes))):
            if t.is_floating_point():
                t.fill_(float("nan"))
    assert all(map(torch.equal, tensors(kept), copies))


def test_what_padding_rows_hold_changes_nothing(subject: Subject) -> None:
    """Invariant 3: NaN in every row beyond the real ones."""
    call = subject.call(subject.entry.inputs.mixed[:1])
    with subject.attach() as handle:
        for _ in range(2):
            expected = [t.clone() for t in tensors(subject.run(call))]
        for method in handle._methods:
            # NaN leads some towers out of their tables, on a GPU for good.
            fill = 0.0 if getattr(method.encoder, "_has_places", False) else torch.nan
            arenas = {} if method.manager is None else method.manager._store.arenas
            for buffer in (b for arena in arenas.values() for b in arena.storage.values()):
                buffer.fill_(fill if buffer.is_floating_point() else 1)
        assert all(map(same, tensors(subject.run(call)), expected))
        assert subject.stats(handle).hits > 0


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# Not on CUDA: an error of a kernel there ends the process. tests/contract tries it on 15 families.
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_no_items_are_eager_modes_business(subject: Subject) -> None:
    """It may refuse them, or return something empty."""
    with subject.attach() as handle:
        tower, call = tower_call(subject, handle)
        rows = len(next(v for v in call.values() if isinstance(v, torch.Tensor)))
        nothing = {
            name: v[:0] if isinstance(v, torch.Tensor) and v.dim() and len(v) == rows else v
            for name, v in call.items()
        }
        if "grid_thw" in nothing:
            nothing["grid_thw"] = nothing["grid_thw"][:0]
        hits = handle.stats().hits
        ours = what_comes(tower, nothing)
        with eager_towers():
            assert ours == what_comes(tower, nothing)
        assert handle.stats().hits == hits


def what_comes(tower: Any, call: dict[str, Any]) -> Any:
    """Shapes of what a tower returns, or the kind of its error."""
    try:
        return [t.shape for t in tensors(tower(**call))]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("flag", ["output_hidden_states", "return_dict"])
def test_other_outputs_of_the_tower_equal_eager(subject: Subject, flag: str) -> None:
    """What a flag changes must be part of the key: with it, without it, with it again.

    In float32 everywhere: in bfloat16 Phi-4's eager mode alone is off by up to 0.3.
    """
    subject, limit = subject.in_float32(), 1e-5 if subject.device == "cpu" else 1e-4
    with subject.attach() as handle:
        tower, call = tower_call(subject, handle)
        for _ in range(3):
            for more in ({flag: flag == "output_hidden_states"}, {}):
                eager = eagerly(tower, call, more)
                if isinstance(eager, Exception):
                    pytest.skip(f"eager mode takes no {flag}: {eager}"[:120])
                assert difference(tower(**{**call, **more}), eager) <= limit


def test_attach_detach_attach(subject: Subject) -> None:
    outcome = Outcome(subject.entry.modality, subject.entry.inputs.kind)
    for _ in range(2):
        with subject.attach() as handle:
            for _ in range(2):  # each with contents of its own: errors are judged by their number
                call = subject.call(subject.entry.inputs.mixed)
                output = subject.run(call)
            outcome.blame("attached", output, subject.eager(call), subject.truth(call))
            assert subject.stats(handle).hits > 0
    assert not outcome.judge()


def tower_call(subject: Subject, handle: Handle) -> tuple[Any, dict[str, Any]]:
    """The tower of the entry and with what the model calls it."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    with rehearsal(lambda encoder, call: seen.append((encoder.tower, dict(call)))):
        subject.run(subject.call(subject.entry.inputs.mixed))
    mine = [
        (getattr(tower.module, tower.methods[-1]), call)
        for tower, call in seen
        if subject.is_about(tower)
    ]
    return mine[0]


def eagerly(tower: Any, call: dict[str, Any], more: dict[str, Any]) -> Any:
    try:
        with eager_towers():
            return tower(**{**call, **more})
    except Exception as error:  # whatever a tower says to a flag that it doesn't know
        return error
