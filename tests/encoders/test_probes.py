"""What fresh graphs of packed towers are asked: the same images again, in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgraph import EncoderCudaGraphManager, GraphConfig
from mmgraph.encoders import PackedEncoder, encoder_for, find_towers
from mmgraph.manager.outputs import flatten_outputs
from mmgraph.recipes import load_recipe
from mmgraph.types import GraphKey, ProbeCall

BUDGETS = (68, 100, 128, 256, 260, 500, 1024, 4092, 4096, 5408, 16384)


@pytest.fixture(params=["qwen2_5_vl:tiny", "qwen3_vl:tiny"])
def encoder(request: pytest.FixtureRequest) -> PackedEncoder:
    (tower,) = find_towers(load_recipe(str(request.param)).build_encoder())
    encoder = encoder_for(tower)
    assert isinstance(encoder, PackedEncoder)
    return encoder


def keys_of(encoder: PackedEncoder, *budgets: int, max_items: int = 8) -> list[GraphKey]:
    config = GraphConfig(token_budgets=budgets, max_items=max_items)
    manager = EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, encoder)
    return manager.keys_to_capture()


def images(call: Any) -> dict[Any, torch.Tensor]:
    """Patches by name."""
    assert isinstance(call, ProbeCall)
    sizes = call["grid_thw"].prod(-1).tolist()
    return dict(zip(call.names, call["hidden_states"].split(sizes), strict=True))


@torch.no_grad()
def test_a_graph_takes_its_probes_and_the_second_is_divided_otherwise(
    encoder: PackedEncoder,
) -> None:
    for key in keys_of(encoder, *BUDGETS):
        totals = []
        for call in encoder.encoder_facts().probes(key):  # type: ignore[misc]
            batch = encoder.item_specs(call)
            totals.append(sum(item.num_tokens for item in batch.items))
            assert totals[-1] <= key.token_budget
            for kind, capacity in enumerate(key.segment_capacity):
                assert sum(i.num_segments[kind] for i in batch.items) <= capacity
                assert max(i.max_seqlen[kind] for i in batch.items) <= key.max_seqlen[kind]
        first, second = encoder.encoder_facts().probes(key)  # type: ignore[misc]
        assert not torch.equal(first["grid_thw"], second["grid_thw"])
        if key.segment_capacity[0] > 1 and key.token_budget >= 128:
            assert max(len(first["grid_thw"]), len(second["grid_thw"])) > 1  # to be kept apart
        if key.token_budget >= 1024 and key.segment_capacity[0] > 1:
            assert totals[1] >= 0.85 * key.token_budget


def test_an_image_of_one_name_is_the_same_everywhere_and_no_other_is(
    encoder: PackedEncoder,
) -> None:
    seen: dict[Any, torch.Tensor] = {}
    count = 0
    for key in keys_of(encoder, *BUDGETS):
        for call in encoder.encoder_facts().probes(key):  # type: ignore[misc]
            for name, patches in images(call).items():
                count += 1
                assert torch.equal(seen.setdefault(name, patches), patches)
    assert len(seen) <= 0.7 * count
    starts = {tuple(patches[0, :8].tolist()) for patches in seen.values()}
    assert len(starts) == len(seen)


def test_graphs_for_segments_of_one_length_are_asked_about_other_contents(
    encoder: PackedEncoder,
) -> None:
    signature = encoder.example_signature()
    kinds = 2 if encoder.metadata._window else 1
    key = GraphKey(128, (2, 8)[:kinds], (64, 16)[:kinds], signature, None, (True,) * kinds)
    first, second = map(images, encoder.encoder_facts().probes(key))  # type: ignore[misc]
    assert len(first) == len(second) == 2
    assert not first.keys() & second.keys()


@torch.no_grad()
def test_an_answer_put_together_is_that_to_the_whole_call(encoder: PackedEncoder) -> None:
    config = GraphConfig(token_budgets=(256, 512), backend="trace", capture="upfront")
    manager = EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, encoder)
    calls: list[int] = []
    whole = encoder.embed_multimodal

    def counted(**call: Any) -> Any:
        calls.append(len(call["grid_thw"]))
        return whole(**call)

    encoder.embed_multimodal = counted  # type: ignore[method-assign]
    manager.capture()
    assert calls.count(2) == 1  # to see that eager mode keeps images apart
    assert set(calls) == {1, 2}  # each by itself
    keys = list(manager._store.entries)
    assert len(calls) < 2 * len(keys)
    probes = manager._store.probes
    layout = manager._store.entries[keys[0]].layout
    with probes.remembered(for_many=True):
        _, second = probes.of(keys[-1])
        together = second.tensors(flatten_outputs, layout)
        for ours, theirs in zip(together, flatten_outputs(whole(**second.call)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
