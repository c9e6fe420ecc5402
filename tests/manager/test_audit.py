"""One call in N is compared with eager mode; what differs is trusted no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph import ConfigError, EncoderCudaGraphManager, GraphConfig, Reason
from mmgraph.manager.audit import Audit
from mmgraph.recipes import load_recipe
from tests.manager.engine import assert_items_equal, call_of, make_manager

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def serve(manager: EncoderCudaGraphManager, times: int) -> None:
    encoder: Any = manager.model
    for seed in range(times):
        call = call_of([8, 4], seed)
        assert_items_equal(manager.execute(call), encoder, call)


@pytest.mark.parametrize(("every", "compared"), [(0, 0), (1, 12), (4, 3), (50, 0)])
def test_as_many_calls_as_wanted_are_compared(every: int, compared: int) -> None:
    manager = make_manager(verify_every=every)
    encoder: Any = manager.model
    for seed in range(12):
        manager.execute(call_of([8, 4], seed))
    assert len(encoder.eager_calls) == compared
    assert manager.stats().misses == {}


def test_without_memory_for_the_comparison_the_answer_still_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(verify_every=1)
    encoder: Any = manager.model
    call = call_of([8, 4])
    expected = encoder.embed_multimodal(**call)

    def fails(**_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    manager.execute(call)
    monkeypatch.setattr(encoder, "embed_multimodal", fails)
    for _ in range(2):
        for ours, theirs in zip(manager.execute(call), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("couldn't be compared: no memory") == 1
    assert manager.stats().misses == {}


def test_a_graph_that_goes_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(verify_every=3)
    encoder: Any = manager.model
    serve(manager, 2)
    (entry,) = manager._store.entries.values()
    replay = entry.graph.replay
    monkeypatch.setattr(entry.graph, "replay", lambda: [tensor + 1 for tensor in replay()])
    wrong = manager.execute(call_of([8, 4], 7))  # the third call: compared, but not waited for
    call = call_of([8, 4], 7)
    with pytest.raises(AssertionError):
        assert_items_equal(wrong, encoder, call)
    for _ in range(2):
        assert_items_equal(manager.execute(call), encoder, call)
    assert manager.stats().misses == {Reason.DIFFERED: 4}
    assert caplog.text.count("differed from eager mode") == 1
    monkeypatch.undo()
    manager.clear()
    hits = manager.stats().hits
    serve(manager, 4)
    assert manager.stats().hits == hits + 8


@pytest.mark.parametrize("device", DEVICES)
def test_what_counts_as_a_difference(device: str) -> None:
    nan = float("nan")
    x = torch.tensor([1.0, 2.0, nan], device=device)
    cases = [
        (x, x.clone(), False),
        (x, x * (1 + 1e-5), False),
        (x, x * 1.1, True),
        (x, x.nan_to_num(), True),
        (x, x[:2], True),
        (x.bfloat16(), x.bfloat16() * 1.02, False),
    ]
    for ours, eager, differs in cases:
        audit = Audit(1, "tower")
        audit.compare([ours], [eager])
        if device == "cuda":
            torch.cuda.synchronize()
        assert audit.failed() is differs
        audit.reset()
        assert not audit.failed()


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["qwen3_vl:tiny", "clip:tiny"])
def test_towers_of_transformers_can_be_compared(recipe: str) -> None:
    import mmgraph

    tower = load_recipe(recipe).build_encoder()
    config = GraphConfig(verify_every=2)
    with mmgraph.attach(tower, config) as handle:
        if recipe.startswith("qwen"):
            patches = torch.randn(64, tower.patch_embed.proj.weight[0].numel())
            call: dict[str, Any] = {"grid_thw": torch.tensor([[1, 8, 8]])}
        else:
            side = tower.config.image_size
            patches, call = torch.randn(2, 3, side, side), {}
        for _ in range(5):
            tower(patches, **call, output_hidden_states=True)
        assert handle.stats().misses == {}
        assert handle.stats().hits == 5 * (1 if call else 2)


def test_it_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="verify_every must be 0"):
        GraphConfig(verify_every=-1)
