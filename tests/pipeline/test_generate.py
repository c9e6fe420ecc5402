"""`generate`, as users call it: the same words from graphs as without, for every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import UnsupportedModelError
from tests.pipeline.architectures import Answer, Architecture, generate
from tests.pipeline.calls import Served, counted
from tests.pipeline.fixed import FIXED
from tests.pipeline.packed import PACKED
from tests.pipeline.speech import SPEECH
from tests.pipeline.tiles import TILES
from tests.pipeline.tiny import IMAGE, tiny_config, tiny_model
from tests.pipeline.unusual import UNUSUAL

ARCHITECTURES = (*PACKED, *FIXED, *TILES, *SPEECH, *UNUSUAL)
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
RELEASE = tuple(map(int, version("transformers").split(".")[:2]))

# Deprecated within transformers itself (Mllama in 5.17).
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@dataclass(frozen=True)
class Case:
    """One question to one architecture."""

    architecture: Architecture
    medium: str

    def __str__(self) -> str:
        return f"{self.architecture.type}-{self.medium}"

    @property
    def is_here(self) -> bool:
        """Whether the installed transformers has it."""
        if self.architecture.broken.get(self.medium) == RELEASE:
            return False
        return self.architecture.since.get(self.medium, (0,)) <= RELEASE

    @property
    def is_quick(self) -> bool:
        return self.medium in self.architecture.quick

    def ask(self, model: Any, device: str, seed: int) -> Answer:
        return generate(model, self.architecture.inputs(self.medium, device, seed))

    @property
    def is_exact(self) -> bool:
        """Whether no budget serves it, so that the first call runs in eager mode."""
        once = self.architecture.once_exact if RELEASE < (5, 24) else ()
        return self.medium in (*self.architecture.exact, *once)

    @property
    def is_eager(self) -> bool:
        return self.medium in self.architecture.eager


CASES = [Case(a, medium) for a in ARCHITECTURES for medium in a.media]
HERE = [case for case in CASES if case.is_here]


def parameters(*, eager: bool) -> list[Any]:
    cases = [case for case in HERE if case.is_eager is eager]
    marks = [() if case.is_quick else pytest.mark.slow for case in cases]
    return [pytest.param(c, id=str(c), marks=m) for c, m in zip(cases, marks, strict=True)]


@pytest.mark.parametrize("case", parameters(eager=False))
def test_words_are_the_same_from_graphs(case: Case, device: str) -> None:
    how = words_are_the_same(case, device)
    assert all(served.from_graphs for served in how[case.is_exact :]), how


@pytest.mark.parametrize("case", parameters(eager=True))
def test_words_are_the_same_where_no_graph_serves(case: Case) -> None:
    how = words_are_the_same(case, "cpu")
    assert all(served.from_graphs or sum(served.misses.values()) > 0 for served in how), how


def words_are_the_same(case: Case, device: str) -> list[Served]:
    """Ask about two media in turn, attached and before and after; return how it was served."""
    model = case.architecture.build(device)
    detached = [case.ask(model, device, seed) for seed in (0, 1)]
    # Words may be the same by chance, with some weights.
    for first, second in zip(*(answer.logits.unbind(1) for answer in detached), strict=True):
        assert not torch.allclose(first, second, **CLOSE), "a wrong encoder wouldn't be noticed"
    how = []
    with mmgraph.attach(model) as handle:
        for seed in (0, 1, 0):
            answer, served = counted(handle, lambda seed=seed: case.ask(model, device, seed))
            assert_same(answer, detached[seed])
            how.append(served)
    assert_same(case.ask(model, device, 0), detached[0])
    return how


def assert_same(answer: Answer, expected: Answer) -> None:
    assert torch.equal(answer.ids, expected.ids)
    torch.testing.assert_close(answer.logits, expected.logits, **CLOSE)


def test_what_this_release_lacks() -> None:
    """Each of these fails without mmgraph; whatever else the tables hold has been tried above."""
    absent = [case for case in CASES if not case.is_here]
    known = {
        "kimi_k25-video": RELEASE < (5, 24),
        "gemma4-video": RELEASE < (5, 20),
        "smolvlm-images": RELEASE == (5, 20),
    }
    assert {str(case) for case in absent} == {name for name, lacks in known.items() if lacks}
    for case in absent:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            case.ask(case.architecture.build("cpu"), "cpu", 0)


def test_there_are_many_architectures() -> None:
    types = [architecture.type for architecture in ARCHITECTURES]
    assert len(types) == len(set(types)) >= 25
    assert len({case.architecture.type for case in CASES if case.is_quick}) >= 25


@pytest.mark.parametrize(
    ("kind", "model", "defaults"),
    [
        # pixels go straight into the language model
        ("fuyu", "FuyuForCausalLM", {}),
        # pictures become tokens through `encode`, which no tower's forward is
        ("emu3", "Emu3ForConditionalGeneration", {"vocabulary_map": {"<image>": IMAGE}}),
    ],
    ids=["fuyu", "emu3"],
)
def test_a_model_without_a_tower_says_so(kind: str, model: str, defaults: dict[str, Any]) -> None:
    changes = {} if kind == "fuyu" else {"vq_config.base_channels": 32}
    whole = tiny_model(model, tiny_config(kind, changes, **defaults))
    with pytest.raises(UnsupportedModelError, match="holds no encoder"):
        mmgraph.attach(whole)
