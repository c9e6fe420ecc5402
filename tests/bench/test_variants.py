from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph.bench import variants as variants_module
from mmgraph.bench.handmade import capture_by_hand
from mmgraph.bench.names import (
    BOUND,
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    METADATA,
    POWER_OF_TWO,
)
from mmgraph.bench.sizes import ImageSize
from mmgraph.bench.subject import open_subject
from mmgraph.bench.variants import Variants, open_variants
from mmgraph.recipes import load_recipe

ALL = (METADATA, HAND_MADE, POWER_OF_TWO, BOUND)


def prepared(name: str, *baselines: str) -> Variants:
    recipe = load_recipe(name)
    with torch.no_grad(), open_subject(recipe, torch.device("cpu"), torch.float32) as subject:
        size = subject.sizes([ImageSize(56)], [1])[0]
        with open_variants(subject, size, subject.inputs(size), baselines) as variants:
            return variants


def test_without_baselines_there_are_eager_mode_and_mmgraph() -> None:
    variants = prepared("qwen2_5_vl:tiny")
    assert list(variants.calls) == [EAGER, EXACT, DEFAULT]
    assert (variants.absent, variants.bound) == ({}, None)


def test_graphs_need_a_gpu_and_say_so() -> None:
    variants = prepared("qwen2_5_vl:tiny", *ALL)
    assert list(variants.calls) == [EAGER, METADATA, EXACT, DEFAULT, BOUND]
    assert variants.absent == dict.fromkeys((HAND_MADE, POWER_OF_TWO), "it needs a CUDA device")


def test_nobody_misses_the_metadata_of_a_tower_of_rows() -> None:
    variants = prepared("clip:tiny", METADATA)
    assert list(variants.calls) == [EAGER, EXACT, DEFAULT]
    assert variants.absent == {}


def test_a_tower_that_fits_no_layout_still_has_a_bound() -> None:
    variants = prepared("video_llama_3:tiny", *ALL)
    assert list(variants.calls) == [EAGER, EXACT, DEFAULT, BOUND]
    assert variants.absent.keys() == {METADATA, HAND_MADE, POWER_OF_TWO}
    assert all("fit no layout" in reason for reason in variants.absent.values())


def test_a_baseline_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("80 GiB")

    monkeypatch.setattr(variants_module, "measure_bound", fails)
    variants = prepared("clip:tiny", BOUND)
    assert variants.absent == {BOUND: "OutOfMemoryError: 80 GiB"}
    assert variants.bound is None


@pytest.mark.gpu
def test_a_graph_made_by_hand_keeps_what_it_reads() -> None:
    """Its metadata has no other owner, and what is allocated next would lie in its place."""

    def make() -> Any:
        scale = torch.full((1 << 20,), 3.0, device="cuda")
        return capture_by_hand(lambda: scale * 2)

    replay = make()
    others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    assert bool((replay() == 6).all())
    assert len(others) == 8
