"""Convolutions over single patches run as matrix products while a tower is captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mmgraph.preparation.patch_embed import linear_patch_embeddings
from mmgraph.recipes import load_recipe

PATCHES = {
    "Conv3d of Qwen": (nn.Conv3d(3, 16, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
    "Conv2d with a bias": (nn.Conv2d(3, 16, 4, 4), (5, 3, 4, 4)),
    "pictures": (nn.Conv2d(3, 256, 4, 4), (5, 3, 8, 12)),
    "pictures with an edge": (nn.Conv2d(3, 256, (4, 3), (4, 3)), (5, 3, 11, 8)),
    "frames": (nn.Conv3d(1, 256, (2, 4, 4), (2, 4, 4)), (5, 1, 6, 8, 4)),
    "one channel": (nn.Conv2d(1, 256, 4, 4), (1, 1, 8, 8)),
}
LEFT_ALONE = {
    "features": (nn.Conv2d(8, 256, 2, 2), (5, 8, 8, 8)),
    "narrow": (nn.Conv2d(3, 255, 4, 4), (5, 3, 8, 12)),
    "no batch": (nn.Conv2d(3, 16, 4, 4), (3, 8, 8)),
    "padding": (nn.Conv2d(3, 16, 4, 4, padding=2), (5, 3, 4, 4)),
    "groups": (nn.Conv2d(4, 16, 4, 4, groups=2), (5, 4, 4, 4)),
    "dilation": (nn.Conv2d(3, 16, 2, 2, dilation=2), (5, 3, 4, 4)),
    "a stride below the kernel": (nn.Conv2d(3, 16, 4, 2), (5, 3, 4, 4)),
}


def operations(layer: nn.Module, x: torch.Tensor) -> set[str]:
    with torch.profiler.profile(acc_events=True) as profile:
        layer(x)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", PATCHES)
@torch.no_grad()
def test_a_convolution_over_patches_is_a_matrix_product(name: str) -> None:
    layer, shape = PATCHES[name]
    x = torch.randn(shape)
    expected = layer(x)
    with linear_patch_embeddings(layer):
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert "aten::convolution" not in operations(layer, x)
    assert "aten::convolution" in operations(layer, x)


@pytest.mark.parametrize("name", LEFT_ALONE)
@torch.no_grad()
def test_any_other_convolution_is_left_alone(name: str) -> None:
    layer, shape = LEFT_ALONE[name]
    x = torch.randn(shape)
    expected = layer(x)
    with linear_patch_embeddings(layer):
        assert torch.equal(layer(x), expected)
        assert "aten::convolution" in operations(layer, x)


@torch.no_grad()
def test_pictures_in_another_layout_come_out_the_same() -> None:
    layer = nn.Conv2d(3, 256, 4, 4)
    x = torch.randn(2, 3, 8, 12).to(memory_format=torch.channels_last)
    expected = layer(x)
    with linear_patch_embeddings(layer):
        output = layer(x)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        rows = output.flatten(2).transpose(1, 2)
        assert rows.is_contiguous()  # what towers do with it takes no copy
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            layer(torch.randn(2, 3, 3, 12))  # as the convolution has it


@pytest.mark.gpu
@pytest.mark.parametrize("pictures", [1, 16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_product_is_as_exact_as_the_convolution(pictures: int, bias: bool) -> None:
    layer = nn.Conv2d(3, 768, 16, 16, bias=bias).to("cuda", torch.bfloat16)
    x = torch.randn(pictures, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()(x.double())
    convolved = layer(x)
    with linear_patch_embeddings(layer):
        product = layer(x)
        assert "aten::convolution" not in operations(layer, x)
    ours, theirs = (float((y.double() - exact).norm()) for y in (product, convolved))
    assert 0 < ours <= 1.01 * theirs


def test_an_error_inside_takes_it_back() -> None:
    tower = load_recipe("qwen2_5_vl:tiny").build_encoder()
    with pytest.raises(ValueError, match="x"), linear_patch_embeddings(tower):
        raise ValueError("x")
    assert not any("forward" in m.__dict__ for m in tower.modules())


def test_a_forward_of_somebodys_own_is_not_taken_over() -> None:
    layer = nn.Conv2d(3, 16, 4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    x = torch.randn(5, 3, 4, 4)
    with linear_patch_embeddings(layer):
        assert layer(x) is x
    assert layer(x) is x
