"""attach and detach: what they refuse, what they leave behind, and what runs in eager mode."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import mmgraph
from mmgraph import ConfigError, GraphConfig, InvalidInputError, Reason, UnsupportedModelError
from mmgraph.encoders import Tower
from mmgraph.modules.watch import _registrations
from mmgraph.preparation import Preparation
from mmgraph.recipes import load_recipe

CONFIG = GraphConfig(token_budgets=(64, 128), row_budgets=(1, 2, 4), max_items=4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def clip(device: str = "cpu") -> Any:
    return load_recipe("clip:tiny").build_model(device=device)


def qwen(device: str = "cpu") -> Any:
    return load_recipe("qwen2_5_vl:tiny").build_encoder(device=device)


def pixels(rows: int = 1, device: str = "cpu") -> torch.Tensor:
    return torch.randn(rows, 3, 56, 56, device=device)


def patches(*grids: tuple[int, int, int], device: str = "cpu") -> dict[str, torch.Tensor]:
    total = sum(t * h * w for t, h, w in grids)
    return {
        "hidden_states": torch.randn(total, 1176, device=device),
        "grid_thw": torch.tensor(grids, device=device),
    }


def test_a_model_without_an_encoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear holds no encoder: .* pixel_values"):
        mmgraph.attach(nn.Linear(2, 2))


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="takes a torch module or a pipeline"):
        mmgraph.attach("Qwen/Qwen2.5-VL-7B-Instruct")


def test_attaching_twice_is_refused_and_the_first_goes_on() -> None:
    model = clip()
    with mmgraph.attach(model, CONFIG) as handle:
        with pytest.raises(ConfigError, match=r"attached already: call detach\(\)"):
            mmgraph.attach(model, CONFIG)
        with torch.no_grad():
            model(pixels())
        assert handle.stats().hits == 1


def test_a_config_that_does_not_fit_leaves_the_model_unattached() -> None:
    model, attributes = qwen(), dict(qwen().__dict__)
    with pytest.raises(ConfigError, match=r"must be multiples of 4 .* got 66: use 68"):
        mmgraph.attach(model, GraphConfig(token_budgets=(66,), max_items=1))
    assert model.__dict__.keys() == attributes.keys()


def test_a_failed_attach_leaves_weights_and_hooks_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU weights have moved by then."""

    def prepare(tower: Tower, *_: Any) -> Preparation:
        return Preparation(tower.module, tower.name, align_weights=True, merge_weights=True)

    def moved(module: nn.Module) -> list[str]:
        return [
            name
            for name, p in module.named_parameters()
            if p.untyped_storage().nbytes() != p.numel() * p.itemsize
        ]

    monkeypatch.setattr("mmgraph.attachment.handle._prepare", prepare)
    monkeypatch.setattr("mmgraph.preparation.align._MIN_FEATURES", 8)
    hooks = torch_modules._global_parameter_registration_hooks
    watched = _registrations._watches  # towers of other tests may be among them, and go at any time
    gc.collect()
    model, before = qwen(), set(watched)
    with mmgraph.attach(model, CONFIG):
        assert moved(model)
        assert set(watched) - before
        assert hooks
    with pytest.raises(ConfigError, match="must be multiples of 4"):
        mmgraph.attach(model, GraphConfig(token_budgets=(66,), max_items=1))
    assert moved(model) == []
    gc.collect()
    assert set(watched) <= before
    assert bool(hooks) == bool(watched)


def test_an_unknown_attention_implementation_runs_as_eager_does() -> None:
    """transformers refuses the name in eager mode too, so the error is its own."""
    model = clip()
    model.config._attn_implementation_internal = "no_such_attention"
    with mmgraph.attach(model, CONFIG) as handle, torch.no_grad():
        with pytest.raises(KeyError, match="no_such_attention"):
            model(pixels())
        assert handle.stats().misses == {Reason.CAPTURE_FAILED: 1}


def test_state_dict_parameters_and_class_are_untouched_while_attached(device: str) -> None:
    model = clip(device)
    kind, names = type(model), list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    with mmgraph.attach(model, CONFIG), torch.no_grad():
        model(pixels(device=device))
        assert type(model) is kind
        assert list(model.state_dict()) == names
        assert [name for name, _ in model.named_modules()] == modules
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_save_pretrained_is_unchanged_while_attached(tmp_path: Any) -> None:
    model = clip()
    with mmgraph.attach(model, CONFIG), torch.no_grad():
        model(pixels())
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    assert "mmgraph" not in (tmp_path / "config.json").read_text()


def test_detaching_twice_does_nothing_more() -> None:
    model = clip()
    handle = mmgraph.attach(model, CONFIG)
    handle.detach()
    handle.detach()
    assert "forward" not in model.__dict__


def test_a_forward_of_the_users_own_comes_back() -> None:
    model = clip()
    original, calls = model.forward, []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    model.forward = own
    handle = mmgraph.attach(model, GraphConfig(enforce_eager=True))
    model.forward(pixel_values=pixels())
    assert calls == [1]
    handle.detach()
    assert model.__dict__["forward"] is own


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_attached_model_has_no_graphs(clone: Any) -> None:
    model = clip()
    with mmgraph.attach(model, CONFIG) as handle, torch.no_grad():
        inputs = pixels()
        expected = model(inputs).last_hidden_state
        twin = clone(model)
        for parameter in twin.parameters():
            parameter.mul_(2)
        output = twin(inputs).last_hidden_state
        assert handle.stats().items == 1
        assert not torch.allclose(output, expected)
        assert torch.equal(model(inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GraphConfig(enforce_eager=True), Reason.ENFORCE_EAGER),
        (GraphConfig(cudagraph_mm_encoder=False), Reason.DISABLED),
    ],
)
def test_a_closed_gate_runs_everything_in_eager_mode_and_counts_it(
    config: GraphConfig, reason: Reason
) -> None:
    model = qwen()
    with mmgraph.attach(model, config) as handle, torch.no_grad():
        output = model(**patches((1, 4, 4), (1, 4, 6)))
        assert output.pooler_output.shape == (10, 64)
        assert handle.stats().misses == {reason: 2}
        assert not handle.is_captured()
        assert handle.capture() == 0


def test_training_mode_and_gradients_run_in_eager_mode(device: str) -> None:
    model = clip(device)
    with mmgraph.attach(model, CONFIG) as handle:
        output = model(pixels(2, device)).last_hidden_state
        assert output.requires_grad
        output.sum().backward()
        assert all(p.grad is not None for p in model.encoder.layers[0].parameters())
        assert handle.stats().misses == {Reason.GRAD: 2}
        model.train()
        with torch.no_grad():
            model(pixels(3, device))
        assert handle.stats().misses == {Reason.GRAD: 2, Reason.TRAINING: 3}
        model.eval().requires_grad_(False)
        model(pixels(1, device))
        inputs = pixels(1, device).requires_grad_()
        model(inputs).last_hidden_state.sum().backward()
        assert inputs.grad is not None
        assert handle.stats().misses[Reason.GRAD] == 3
        assert handle.stats().hits == 1
        assert handle.stats().items == 7


@torch.no_grad()
def test_autocast_runs_in_eager_mode(device: str) -> None:
    model = clip(device)
    with mmgraph.attach(model, CONFIG) as handle:
        with torch.autocast(device, torch.bfloat16):
            model(pixels(1, device))
        assert handle.stats().misses == {Reason.AUTOCAST: 1}


@torch.no_grad()
def test_another_dtype_gives_what_eager_gives(device: str) -> None:
    """CLIP casts pixels to its own dtype: float64 pixels are a graph of their own."""
    model = clip(device)
    inputs = pixels(2, device).double()
    expected = model(inputs).last_hidden_state
    with mmgraph.attach(model, CONFIG) as handle:
        torch.testing.assert_close(model(inputs).last_hidden_state, expected)
        whole = torch.randint(0, 3, (1, 3, 56, 56), device=device)
        output = model(whole).last_hidden_state
        assert handle.stats().misses == {Reason.DTYPE: 1}
        assert handle.stats().hits == 2
    torch.testing.assert_close(output, model(whole).last_hidden_state)


@torch.no_grad()
def test_a_tower_on_meta_runs_as_eager_does(caplog: pytest.LogCaptureFixture) -> None:
    model = load_recipe("clip:tiny").build_model(device="meta")
    with mmgraph.attach(model, CONFIG) as handle:
        assert model(pixels().to("meta")).last_hidden_state.is_meta
        assert handle.stats().misses == {Reason.PLACEMENT: 1}
    assert "parameters on the meta device" in caplog.text


@torch.no_grad()
def test_an_offloaded_tower_runs_as_eager_does(device: str) -> None:
    from accelerate import cpu_offload

    model = clip(device)
    inputs = pixels(2, device)
    expected = model(inputs).last_hidden_state
    cpu_offload(model, torch.device(device))
    with mmgraph.attach(model, CONFIG) as handle:
        torch.testing.assert_close(model(inputs).last_hidden_state, expected)
        assert handle.stats().misses == {Reason.PLACEMENT: 2}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[1, 4, 6]], r"stands for 24 patches, but hidden_states has 16 rows"),
        ([[1, 4, 4], [1, 4, 4]], r"stands for 32 patches"),  # one image too many
        ([[1, 5, 4]], r"h and w multiples of 2"),
        ([[1, -4, -4]], r"each at least 1"),
        ([[0, 4, 4]], r"each at least 1"),
        ([[4, 4]], r"a grid is \(t, h, w\)"),
    ],
)
@torch.no_grad()
def test_a_grid_that_does_not_match_is_a_clear_error_and_breaks_nothing(
    grid: list[list[int]], message: str, device: str
) -> None:
    """Eager mode reads out of bounds then, which on a GPU ends the process."""
    model = qwen(device)
    good = patches((1, 4, 4), device=device)
    with mmgraph.attach(model, CONFIG) as handle:
        expected = model(**good).pooler_output
        with pytest.raises(InvalidInputError, match=message):
            model(**{**good, "grid_thw": torch.tensor(grid, device=device)})
        assert torch.equal(model(**good).pooler_output, expected)
        assert handle.stats().hits == handle.stats().items == 2


@torch.no_grad()
def test_weights_updated_in_place_are_followed(device: str) -> None:
    model = clip(device)
    inputs = pixels(1, device)
    with mmgraph.attach(model, CONFIG):
        before = model(inputs).last_hidden_state
        for parameter in model.parameters():
            parameter.mul_(1.5)
        after = model(inputs).last_hidden_state
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model(inputs).last_hidden_state, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_positional_and_keyword_calls_share_a_graph(device: str) -> None:
    model = clip(device)
    with mmgraph.attach(model, CONFIG) as handle:
        model(pixels(1, device))
        model(pixel_values=pixels(1, device))
        model(pixel_values=pixels(1, device), interpolate_pos_encoding=False)  # the default
        assert len(handle.stats().graphs) == 1
        assert handle.stats().hits == 3
        with pytest.raises(TypeError):
            model(*([pixels(1, device)] * 9))


@torch.no_grad()
def test_several_image_sizes_are_graphs_of_their_own(device: str) -> None:
    model = clip(device)
    large = torch.randn(1, 3, 84, 84, device=device)
    expected = model(large, interpolate_pos_encoding=True).last_hidden_state
    with mmgraph.attach(model, CONFIG) as handle:
        model(pixels(1, device))
        output = model(large, interpolate_pos_encoding=True).last_hidden_state
        assert handle.stats().hits == 2
        assert len(handle.stats().graphs) == 2
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_threads_get_their_own_answers(device: str) -> None:
    model = clip(device)
    inputs = [pixels(1 + i % 3, device) for i in range(12)]
    expected = [model(x).last_hidden_state for x in inputs]
    outputs: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        with torch.no_grad():
            outputs[i] = model(inputs[i]).last_hidden_state

    with mmgraph.attach(model, CONFIG) as handle:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.stats().hits == sum(len(x) for x in inputs)
    for i, output in outputs.items():
        torch.testing.assert_close(output, expected[i], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_outputs_can_be_used_in_training_what_comes_after(device: str) -> None:
    """Frozen features feed a trainable head: an output must be no inference tensor."""
    model = clip(device)
    head = nn.Linear(64, 2).to(device)
    with mmgraph.attach(model, CONFIG) as handle:
        features = model(pixels(2, device)).last_hidden_state
        assert handle.stats().hits == 2
    with torch.enable_grad():
        head(features).sum().backward()
    assert head.weight.grad is not None


def test_inference_mode_and_no_grad_take_turns(device: str) -> None:
    model = clip(device)
    with mmgraph.attach(model, CONFIG) as handle:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                inputs = pixels(2, device)
                output = model(inputs).last_hidden_state
                torch.testing.assert_close(output, model.forward(inputs).last_hidden_state)
            assert output.is_inference() == (mode is torch.inference_mode)
        assert handle.stats().hits == 16


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@torch.no_grad()
def test_inputs_on_another_device_give_eagers_error_and_are_counted() -> None:
    model = clip("cuda")
    with mmgraph.attach(model, CONFIG) as handle:
        with pytest.raises(RuntimeError, match=r"same device|on cpu|type"):
            model(pixels(2))
        assert handle.stats().misses == {Reason.DEVICE: 2}
        model(pixels(1, "cuda"))
        assert handle.stats().hits == 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_sync_would_be_noticed() -> None:
    """The guard of the next test: with grids on the device there is one sync, by design."""
    with syncs_are_errors(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


@pytest.mark.gpu
@torch.no_grad()
def test_a_hit_with_grids_on_the_cpu_never_waits_for_the_device() -> None:
    model = load_recipe("qwen2_5_vl:tiny").build_encoder(device="cuda", dtype=torch.bfloat16)
    call = patches((1, 4, 4), (1, 4, 6))
    call = {"hidden_states": call["hidden_states"].cuda().bfloat16(), "grid_thw": call["grid_thw"]}
    other = {**call, "grid_thw": torch.tensor([[1, 4, 6], [1, 4, 4]])}
    with mmgraph.attach(model, CONFIG) as handle:
        model(**call)
        torch.cuda.synchronize()
        with syncs_are_errors():
            model(**call)  # metadata known
            model(**other)  # metadata built and uploaded
        assert handle.stats().hits == 6


@pytest.mark.gpu
@torch.no_grad()
def test_streams_take_turns_in_the_shared_buffers() -> None:
    model = clip("cuda")
    first, second = pixels(1, "cuda"), pixels(1, "cuda")
    expected = [model(x).last_hidden_state for x in (first, second)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with mmgraph.attach(model, CONFIG):
        model(first)
        torch.cuda.synchronize()
        for _ in range(5):
            outputs = []
            for stream, inputs in zip(streams, (first, second), strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    outputs.append(model(inputs).last_hidden_state)
            torch.cuda.synchronize()
            for output, truth in zip(outputs, expected, strict=True):
                torch.testing.assert_close(output, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_a_call_inside_somebody_elses_capture_is_recorded_as_eager() -> None:
    model = clip("cuda")
    inputs = pixels(1, "cuda")
    expected = model(inputs).last_hidden_state
    with mmgraph.attach(model, CONFIG) as handle:
        model(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(inputs).last_hidden_state
        graph.replay()
        torch.cuda.synchronize()
        assert handle.stats().misses == {Reason.COMPILING: 1}
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_graph_memory_goes_with_detach(compiled: bool) -> None:
    model = load_recipe("clip:tiny").build_model(device="cuda")
    torch.cuda.empty_cache()
    for _ in range(2):  # the first round also loads libraries and their workspaces
        before = torch.cuda.memory_reserved()
        with mmgraph.attach(model, replace(CONFIG, compile_blocks=compiled)) as handle:
            model(pixels(4, "cuda"))
            assert handle.stats().graph_bytes > 0
            assert handle.stats().graphs[0].num_bytes > 0
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
