"""The contract list of docs/design.md, for every encoder and on every device there is."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from mmgraph import GraphConfig, Handle, Reason
from tests.contract.cases import FAMILIES, OVERSIZED, Case, error, tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, device: str) -> Case:
    """One tower for all tests of a family: pytest groups them by this parameter."""
    return Case(str(request.param), device)


@pytest.fixture(scope="module")
def shared(case: Case) -> Iterator[Handle]:
    """A handle that keeps its graphs from test to test, as a server does."""
    with case.attach() as handle:
        yield handle


@torch.no_grad()
def test_every_division_of_a_call_equals_eager(case: Case, shared: Handle) -> None:
    verdicts = []
    for name, sizes in case.sizes.items():
        call = case.call(sizes)
        before = shared.stats()
        output = case.tower(**call)
        after = shared.stats()
        eager = case.eager(call)
        case.assert_equal_to_eager(output, eager, call)
        verdicts.append(case.judge(output, eager, call))
        oversized = OVERSIZED.get(name, 0)
        assert after.hits - before.hits == len(sizes) - oversized, name
        assert after.misses.get(Reason.ABOVE_BUDGET, 0) - before.misses.get(
            Reason.ABOVE_BUDGET, 0
        ) == (oversized), name
    case.assert_as_exact_as_eager(verdicts)


@torch.no_grad()
def test_small_then_large_then_small_again(case: Case, shared: Handle) -> None:
    small, large = case.sizes["one"], case.sizes["largest"]
    call = case.call(small)
    first = case.tower(**call)
    case.tower(**case.call(large))
    again = case.tower(**call)
    for a, b in zip(tensors(first), tensors(again), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_outputs_belong_to_the_caller(case: Case, shared: Handle) -> None:
    call = case.call(case.sizes["one"])
    kept = case.tower(**call)
    copies = [t.clone() for t in tensors(kept)]
    for _ in range(3):
        later = case.tower(**case.call(case.sizes["one"]))
        for t in tensors(later):
            t.fill_(float("nan"))
    for a, b in zip(tensors(kept), copies, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_the_output_has_the_type_and_structure_of_eager(case: Case, shared: Handle) -> None:
    call = case.call(case.sizes["one"])
    output, eager = case.tower(**call), case.eager(call)
    assert type(output) is type(eager)
    if not isinstance(output, torch.Tensor):
        assert list(output.keys()) == list(eager.keys())
    assert not any(t.is_inference() or t.requires_grad for t in tensors(output))


@torch.no_grad()
def test_other_outputs_are_graphs_of_their_own(case: Case, shared: Handle) -> None:
    """output_hidden_states changes what comes back, so it must be part of the key."""
    if case.recipe.library == "timm":
        plain, features = case.call(case.sizes["one"]), case.call(case.sizes["one"])
        before = shared.stats().hits
        output = case.tower.forward_features(features["x"])
        assert shared.stats().hits == before + 1
        with case.eagerly():
            eager = case.tower.forward_features(features["x"])
        assert error(output, eager) <= (1e-5 if case.device.type == "cpu" else 2e-2)
        assert case.tower(**plain).shape != output.shape
        return
    call = case.call(case.sizes["one"])
    plain = case.tower(**call)
    output = case.tower(**call, output_hidden_states=True)
    assert len(tensors(output)) > len(tensors(plain))
    eager = case.eager(call, output_hidden_states=True)
    assert list(output.keys()) == list(eager.keys())  # indexing by number goes by it
    assert len(output.hidden_states) == len(eager.hidden_states)
    assert shared.stats().misses.get(Reason.CAPTURE_FAILED) is None
    case.assert_equal_to_eager(case.tower(**call), case.eager(call), call)


@torch.no_grad()
def test_no_items_go_to_eager_and_are_counted_as_none(case: Case, shared: Handle) -> None:
    call = case.call([])
    before = shared.stats()
    raised = [_outcome(lambda: case.tower(**call)), _outcome(lambda: case.eager(call))]
    after = shared.stats()
    assert raised[0] == raised[1]
    assert after.items == before.items
    assert after.calls == before.calls + 1


@torch.no_grad()
def test_nan_in_one_item_stays_there(case: Case, shared: Handle) -> None:
    sizes = case.sizes["several_of_one_size"]
    call = case.call(sizes)
    name = next(k for k, v in call.items() if v.is_floating_point())
    rows = call[name].shape[0] // len(sizes)
    call[name][:rows] = float("nan")
    output, eager = tensors(case.tower(**call)), tensors(case.eager(call))
    for a, b in zip(output, eager, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert a.isnan().any()
        assert not a.isnan().all()


@torch.no_grad()
def test_what_padding_rows_hold_changes_nothing(case: Case, shared: Handle) -> None:
    """Invariant 3: NaN in every row beyond the real ones, in buffers and in free memory."""
    call = case.call(case.sizes["one"])
    expected = [t.clone() for t in tensors(case.tower(**call))]
    for arena in case.arenas(shared):
        for buffer in arena.storage.values():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
            else:
                buffer.fill_(1)
    case.poison_pool(shared)
    for a, b in zip(tensors(case.tower(**call)), expected, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_attach_detach_attach(case: Case, device: str) -> None:
    twin = copy.copy(case)
    twin.tower = case.recipe.build_encoder(device=device, dtype=case.dtype)
    attributes, state = dict(twin.tower.__dict__), list(twin.tower.state_dict())
    implementation = getattr(getattr(twin.tower, "config", None), "_attn_implementation", None)
    call = twin.call(twin.sizes["one"])
    for _ in range(2):
        with twin.attach() as handle:
            output = twin.tower(**call)
            assert handle.stats().hits == 1
            assert list(twin.tower.state_dict()) == state
        assert twin.tower.__dict__ == attributes
        config = getattr(twin.tower, "config", None)
        assert getattr(config, "_attn_implementation", None) == implementation
        with torch.no_grad():
            twin.assert_equal_to_eager(output, twin.eager(call), call)


@torch.no_grad()
def test_everything_captured_up_front_is_enough(case: Case, device: str) -> None:
    twin = copy.copy(case)
    twin.tower = case.recipe.build_encoder(device=device, dtype=case.dtype)
    config = GraphConfig(
        token_budgets=(64, 256), row_budgets=(1, 4), max_items=4, capture="upfront"
    )
    with twin.attach(config) as handle:
        graphs = len(handle.stats().graphs)
        assert graphs >= 2
        for name in ("one", "several_of_one_size", "largest"):
            call = twin.call(twin.sizes[name])
            twin.assert_equal_to_eager(twin.tower(**call), twin.eager(call), call)
        stats = handle.stats()
        assert len(stats.graphs) == graphs
        assert not stats.misses
        assert stats.hits == stats.items > 0


def _outcome(call: object) -> object:
    try:
        return [t.shape for t in tensors(call())]  # type: ignore[operator]
    except Exception as error:
        return type(error)
