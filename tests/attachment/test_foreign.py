"""Calls that somebody else looks into or transforms, and copies that somebody else makes."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, PreTrainedModel

import mmgraph
from mmgraph import ConfigError, GraphConfig, Handle, Reason
from mmgraph.recipes import load_recipe

CONFIG = GraphConfig(row_budgets=(1, 2, 4), compile_blocks=False)


@pytest.fixture
def tower() -> nn.Module:
    return load_recipe("siglip:tiny").build_encoder(dtype=torch.float32).requires_grad_(False)


def pixels(tower: nn.Module, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, tower.config.image_size, tower.config.image_size)


def features(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = tower(x).last_hidden_state
    return output


def in_eager_mode(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with mmgraph.encoders.eager_towers():
        return features(tower, x)


def traced(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.jit.trace(lambda y: features(tower, y), x)(x)
    return output


def mapped(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: features(tower, row[None])[0])(x)


def pushed_forward(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # others have no derivatives
        output = features(tower, forward_ad.make_dual(x, torch.ones_like(x)))
        primal, tangent = forward_ad.unpack_dual(output)
        assert tangent is not None
        return primal


def counted(tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as flops:
        output = features(tower, x)
    assert flops.get_total_flops() > 0
    return output


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:There is a performance drop")
@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning"
)
@torch.no_grad()
@pytest.mark.parametrize("look", [traced, mapped, pushed_forward, counted])
@pytest.mark.parametrize("first", [False, True])
def test_who_looks_into_a_call_sees_its_operations(
    tower: nn.Module, look: Callable[[nn.Module, torch.Tensor], torch.Tensor], first: bool
) -> None:
    x = pixels(tower)
    expected = in_eager_mode(tower, x)
    with mmgraph.attach(tower, CONFIG) as handle:
        if not first:
            features(tower, x)
        torch.testing.assert_close(look(tower, x), expected, rtol=1e-4, atol=1e-4)
        assert handle.stats().misses.keys() == {Reason.COMPILING}
        hits = handle.stats().hits
        torch.testing.assert_close(features(tower, x), expected, rtol=1e-4, atol=1e-4)
        assert handle.stats().hits == hits + 2


class Reader(PreTrainedModel):
    """Reads the features of another encoder, as a Q-Former does."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(4, 4)

    def forward(
        self, pixel_values: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = self.linear(pixel_values) + encoder_hidden_states
        return output


def test_gradients_flow_through_every_argument() -> None:
    reader = Reader(PretrainedConfig()).requires_grad_(False).eval()
    with mmgraph.attach(reader, CONFIG) as handle:
        x = torch.randn(2, 4)
        assert not reader(x, torch.randn(2, 4)).requires_grad
        assert handle.stats().hits == 2
        assert reader(x, torch.randn(2, 4, requires_grad=True)).requires_grad
        assert handle.stats().misses == {Reason.GRAD: 2}


@torch.no_grad()
def test_what_a_trainer_hands_down_is_no_part_of_a_call(tower: nn.Module) -> None:
    with mmgraph.attach(tower, CONFIG) as handle:
        for number in (3, 5, 8):
            x = pixels(tower)
            output = tower(x, num_items_in_batch=torch.tensor(number)).last_hidden_state
            torch.testing.assert_close(output, in_eager_mode(tower, x), rtol=1e-4, atol=1e-4)
        assert (handle.stats().hits, len(handle.stats().graphs)) == (6, 1)


@torch.no_grad()
def test_replicas_of_data_parallel_run_their_own_weights(tower: nn.Module) -> None:
    x = pixels(tower)
    with mmgraph.attach(tower, CONFIG):
        features(tower, x)
        replica: Any = tower._replicate_for_data_parallel()
        assert not {"forward", "_replicate_for_data_parallel"} & replica.__dict__.keys()
        for name, part in replica._modules.items():  # what torch.nn.parallel.replicate does
            twin = copy.deepcopy(part)
            for parameter in twin.parameters():
                parameter.mul_(0.5)
            replica._modules[name] = twin
        replica._parameters = {n: p * 0.5 for n, p in tower._parameters.items()}
        assert not torch.allclose(features(replica, x), features(tower, x), atol=1e-3)
    assert "_replicate_for_data_parallel" not in tower.__dict__


@torch.no_grad()
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_replicas_of_its_own(
    tower: nn.Module, make: Callable[[nn.Module], nn.Module]
) -> None:
    with mmgraph.attach(tower, CONFIG):
        twin: Any = make(tower)
    replica = twin._replicate_for_data_parallel()
    assert replica._modules.keys() == twin._modules.keys()
    assert all(a is b for a, b in zip(replica.children(), twin.children(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        (Reason.TRAINING, lambda tower: tower.train() and nullcontext()),
        (Reason.AUTOCAST, lambda tower: torch.autocast("cpu", torch.bfloat16)),
        (Reason.GRAD, lambda tower: torch.enable_grad()),
    ],
)
def test_the_log_says_once_why_a_call_was_eager(
    tower: nn.Module,
    reason: Reason,
    spoil: Callable[[nn.Module], AbstractContextManager[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "mmgraph")
    tower.requires_grad_(reason is Reason.GRAD)
    with mmgraph.attach(tower, CONFIG), spoil(tower):
        for _ in range(3):
            features(tower, pixels(tower))
    assert caplog.messages == [
        f"SiglipVisionModel: a call was served in eager mode: {reason.value}"
    ]


def use(handle: Handle) -> None:
    with handle:
        pass


@pytest.mark.parametrize("action", [Handle.capture, lambda h: h.capturing().__enter__(), use])
def test_a_handle_that_is_detached_says_so(
    tower: nn.Module, action: Callable[[Handle], Any]
) -> None:
    handle = mmgraph.attach(tower, CONFIG)
    handle.detach()
    with pytest.raises(ConfigError, match="the handle is detached: attach the model again"):
        action(handle)
    assert not handle.is_captured()


@pytest.mark.parametrize("config", [{"backend": "trace"}, {}, "trace"])
def test_settings_are_a_config(tower: nn.Module, config: Any) -> None:
    with pytest.raises(ConfigError, match="config must be a GraphConfig, got"):
        mmgraph.attach(tower, config)


@torch.no_grad()
def test_sizes_are_counted_without_graphs(tower: nn.Module) -> None:
    """A trace of the traffic can be had before graphs are switched on."""
    with mmgraph.attach(tower, GraphConfig(enforce_eager=True)) as handle:
        features(tower, pixels(tower))
        stats = handle.stats()
    assert stats.misses == {Reason.ENFORCE_EAGER: 2}
    assert sum(stats.call_sizes.values()) == 1
    assert sum(stats.item_sizes.values()) == 2


def test_transforms_of_functional_calls_go_through(tower: nn.Module) -> None:
    x = pixels(tower)
    weights = {name: p.detach().clone() for name, p in tower.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = functional_call(tower, parameters, (x,)).last_hidden_state.sum()
        return output

    expected = torch.func.grad(loss)(weights)
    with mmgraph.attach(tower, CONFIG) as handle:
        with torch.no_grad():
            features(tower, x)
        ours = torch.func.grad(loss)(weights)
        assert handle.stats().misses == {Reason.COMPILING: 2}
        with torch.no_grad():
            features(tower, x)
        assert handle.stats().graphs[0].replays == 2  # and nothing has changed
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-3)
