"""Whether weights are where a graph can use them."""

from __future__ import annotations

import accelerate
import pytest
import torch
from torch import nn

from mmgraph.encoders import encoder_for, find_towers
from mmgraph.modules.placement import first_parameter, main_dtype, placement_problem
from mmgraph.recipes import load_recipe


@pytest.fixture
def tower() -> nn.Module:
    return load_recipe("vit:tiny").build_encoder()


def test_a_tower_in_one_place_is_no_problem(tower: nn.Module) -> None:
    assert placement_problem(tower) is None
    assert placement_problem(nn.ReLU()) is None  # no weights at all


def test_a_tower_on_meta_is_a_problem() -> None:
    tower = load_recipe("vit:tiny").build_encoder(device="meta")
    assert placement_problem(tower) == "the encoder has parameters on the meta device"


def test_one_parameter_or_buffer_on_meta_is_enough(tower: nn.Module) -> None:
    tower.register_buffer("table", torch.zeros(1, device="meta"))
    assert placement_problem(tower) == "the encoder has parameters on the meta device"
    del tower.table
    assert placement_problem(tower) is None
    tower.layernorm.bias = nn.Parameter(torch.zeros(64, device="meta"))
    assert placement_problem(tower) == "the encoder has parameters on the meta device"


def test_offloaded_weights_are_a_problem_until_the_hooks_are_gone(tower: nn.Module) -> None:
    accelerate.cpu_offload(tower)
    problem = placement_problem(tower)
    assert problem is not None
    assert problem.startswith("accelerate moves the weights of 'embeddings")
    assert problem.endswith(" in at each forward")
    (found,) = find_towers(tower)
    assert encoder_for(found).check_placement() == problem
    accelerate.hooks.remove_hook_from_submodules(tower)
    assert placement_problem(tower) is None


def test_offload_of_a_part_is_a_problem(tower: nn.Module) -> None:
    accelerate.cpu_offload(tower.layernorm)
    assert placement_problem(tower) == (
        "accelerate moves the weights of 'layernorm' in at each forward"
    )


def test_offload_among_other_hooks_is_found(tower: nn.Module) -> None:
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", offload=True)
    accelerate.hooks.add_hook_to_module(tower.layernorm, accelerate.hooks.ModelHook())
    assert placement_problem(tower) is None
    accelerate.hooks.add_hook_to_module(tower.layernorm, hook, append=True)
    assert "'layernorm'" in str(placement_problem(tower))


def test_hooks_that_move_only_inputs_are_no_problem(tower: nn.Module) -> None:
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    accelerate.hooks.add_hook_to_module(tower, hook)
    assert placement_problem(tower) is None


@pytest.mark.gpu
def test_a_tower_split_over_devices_is_a_problem(tower: nn.Module) -> None:
    tower.layernorm.cuda()
    assert placement_problem(tower) == "the encoder is split over cpu, cuda:0"
    tower.cuda()
    assert placement_problem(tower) is None


def test_the_first_parameter_is_looked_up_anew(tower: nn.Module) -> None:
    probe = first_parameter(tower)
    assert probe() is next(tower.parameters())
    for change in (lambda: tower.half(), lambda: tower.to("meta")):
        change()
        assert probe() is next(tower.parameters())
    owner = tower.embeddings
    owner.cls_token = nn.Parameter(torch.zeros(1, 1, 64))  # another object of the same name
    assert probe() is owner.cls_token
    owner.cls_token = None
    assert probe().device.type == "cpu"


def test_the_first_parameter_of_none_is_on_the_cpu() -> None:
    assert first_parameter(nn.ReLU())().device.type == "cpu"


def test_the_dtype_is_that_of_the_weights(tower: nn.Module) -> None:
    assert main_dtype(tower) is torch.float32
    assert main_dtype(tower.to(torch.bfloat16)) is torch.bfloat16
    assert main_dtype(nn.ReLU()) is torch.float32


def test_integer_weights_say_nothing_of_the_dtype() -> None:
    module = nn.Module()
    module.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    module.scale = nn.Parameter(torch.ones(4, dtype=torch.float16))
    assert main_dtype(module) is torch.float16
