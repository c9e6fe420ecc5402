"""timm as its users call it: every way into a model, sizes that change, half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mmgraph
from mmgraph import GraphConfig, Reason, UnsupportedModelError
from tests.pipeline.calls import counted, served
from tests.pipeline.compare import assert_as_exact, assert_same_output
from tests.pipeline.timm_models import MODELS, WAYS, images, pairs


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(m, way, id=f"{m}, {way}", marks=() if MODELS[m].quick else pytest.mark.slow)
        for m, way in pairs()
    ],
)
def test_every_way_into_a_model_is_served(name: str, way: str, device: str) -> None:
    model, call = MODELS[name].build(device), WAYS[way]
    contents = [MODELS[name].images(2, device, seed) for seed in (0, 1)]
    expected = [call(model, x) for x in contents]
    with mmgraph.attach(model) as handle:
        for x, eager in zip(contents, expected, strict=True):
            output, how = counted(handle, lambda x=x: call(model, x))
            assert how.from_graphs
            assert_same_output(output, eager)
    assert_same_output(call(model, contents[0]), expected[0])


def test_ways_in_have_graphs_of_their_own(device: str) -> None:
    """What is asked for is part of the key, and one call is one call however it goes on inside."""
    model, x = MODELS["vit"].build(device), MODELS["vit"].images(2, device)
    with mmgraph.attach(model) as handle:
        for call in [*WAYS.values(), *WAYS.values()]:
            how = served(handle, lambda call=call: call(model, x))
            assert how.from_graphs
            assert how.calls == 1
        assert len(handle.stats().graphs) == len(WAYS)


def test_only_the_usual_ways_are_captured_up_front(device: str) -> None:
    model, x = MODELS["vit"].build(device), MODELS["vit"].images(2, device)
    config = GraphConfig(row_budgets=(2,), capture="upfront")
    with mmgraph.attach(model, config) as handle:
        assert len(handle.stats().graphs) == 2
        assert served(handle, lambda: model(x)).from_graphs
        assert served(handle, lambda: model.forward_features(x)).from_graphs
        how = served(handle, lambda: model.forward_intermediates(x))
        assert how.misses == {Reason.NOT_CAPTURED: 2}
        with handle.capturing():
            model.forward_intermediates(x)
        assert served(handle, lambda: model.forward_intermediates(x)).from_graphs


@pytest.mark.parametrize(
    ("name", "patch", "arguments"),
    [
        pytest.param("vit", 16, {"dynamic_img_size": True}, id="vit"),
        # sizes that are no multiples of the patch
        pytest.param("vit", 17, {"dynamic_img_size": True, "dynamic_img_pad": True}, id="padded"),
        pytest.param("dinov2 with registers", 14, {"dynamic_img_size": True}, id="registers"),
        pytest.param("eva", 14, {"dynamic_img_size": True}, id="eva", marks=pytest.mark.slow),
        pytest.param("swin", 28, {"strict_img_size": False}, id="swin", marks=pytest.mark.slow),
        pytest.param("convnext", 32, {}, id="convnext", marks=pytest.mark.slow),
    ],
)
def test_sizes_change_from_call_to_call(
    name: str, patch: int, arguments: dict[str, Any], device: str
) -> None:
    model = MODELS[name].build(device, **arguments)
    sizes = [(4 * patch, 4 * patch), (4 * patch, 6 * patch), (5 * patch, 3 * patch)]
    contents = [images(2, size, device, seed) for seed, size in enumerate(sizes * 2)]
    expected = [model(x) for x in contents]
    with mmgraph.attach(model) as handle:
        for x, eager in zip(contents, expected, strict=True):
            output, how = counted(handle, lambda x=x: model(x))
            assert how.from_graphs
            assert_same_output(output, eager)
        assert len(handle.stats().graphs) == len(sizes)


def test_batches_of_any_number_share_graphs(device: str) -> None:
    model = MODELS["vit"].build(device)
    contents = [MODELS["vit"].images(count, device, seed=count) for count in (4, 1, 3, 2, 7)]
    expected = [model(x) for x in contents]
    with mmgraph.attach(model, GraphConfig(row_budgets=(4,))) as handle:
        for x, eager in zip(contents, expected, strict=True):
            output, how = counted(handle, lambda x=x: model(x))
            assert (how.hits, how.misses) == (len(x), {})
            assert_same_output(output, eager)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, id="bfloat16"),
        pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["vit", "eva", "swin", "convnext"])
def test_half_precision(name: str, dtype: torch.dtype, device: str) -> None:
    model, x = MODELS[name].build(device), MODELS[name].images(2, device)
    truth = model.forward_features(x)
    model, x = model.to(dtype), x.to(dtype)
    eager = model.forward_features(x)
    with mmgraph.attach(model) as handle:
        output, how = counted(handle, lambda: model.forward_features(x))
        assert how.from_graphs
    assert_as_exact(output, eager, truth)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_channels_last(name: str, device: str) -> None:
    model = MODELS[name].build(device).to(memory_format=torch.channels_last)
    for x in [MODELS[name].images(2, device, seed) for seed in (0, 1)]:
        x = x.to(memory_format=torch.channels_last)
        eager = model.forward_features(x)
        with mmgraph.attach(model) as handle:
            output, how = counted(handle, lambda x=x: model.forward_features(x))
            assert how.from_graphs
        assert_same_output(output, eager)


def patches_of(*sizes: tuple[int, int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates (B, N, 2) and validity (B, N) of images of h x w patches, padded."""
    coordinates = torch.zeros(len(sizes), length, 2, dtype=torch.int64)
    for row, (h, w) in zip(coordinates, sizes, strict=True):
        row[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    counts = torch.tensor([h * w for h, w in sizes])
    return coordinates, torch.arange(length) < counts[:, None]


@pytest.mark.parametrize("method", ["forward", "forward_features"])
def test_naflex_patches_with_coordinates_get_graphs_of_their_own(method: str, device: str) -> None:
    """Sizes are read on the host, so no budget serves; the second call of the same sizes does."""
    model = MODELS["naflexvit"].build(device)
    coordinates, is_valid = (t.to(device) for t in patches_of((4, 6), (5, 3), length=32))
    generator = torch.Generator().manual_seed(0)
    contents = [torch.randn(2, 32, 768, generator=generator).to(device) for _ in range(3)]

    def call(x: torch.Tensor) -> Any:
        return getattr(model, method)(x, patch_coord=coordinates, patch_valid=is_valid)

    expected = [call(x) for x in contents]
    with mmgraph.attach(model) as handle:
        for count, (x, eager) in enumerate(zip(contents, expected, strict=True)):
            output, how = counted(handle, lambda x=x: call(x))
            assert_same_output(output, eager)
            assert how.from_graphs or count == 0


def test_a_batch_of_the_naflex_collator_is_counted(device: str) -> None:
    """It is one dict, which no graph takes: eager mode, and the statistics say so."""
    model = MODELS["naflexvit"].build(device)
    coordinates, is_valid = patches_of((4, 6), (5, 3), length=32)
    batch = {"patches": torch.randn(2, 32, 768), "patch_coord": coordinates}
    batch = {name: t.to(device) for name, t in {**batch, "patch_valid": is_valid}.items()}
    eager = model(batch)
    with mmgraph.attach(model) as handle:
        output, how = counted(handle, lambda: model(batch))
        assert how.from_graphs or list(how.misses) == [Reason.UNSUPPORTED_CALL]
    assert_same_output(output, eager)


def test_features_only_of_a_transformer_goes_through_the_model_within(device: str) -> None:
    """Its format is an enum, which is counted where no graph takes it."""
    vit = MODELS["vit"]
    net, x = feature_net("vit", device), vit.images(2, device)
    eager = net(x)
    with mmgraph.attach(net.model) as handle:
        output, how = counted(handle, lambda: net(x))
        assert how.from_graphs or list(how.misses) == [Reason.UNSUPPORTED_CALL]
    assert_same_output(output, eager)


def test_features_only_of_a_convolutional_model_is_refused() -> None:
    """timm takes it apart into stages, none of which is a model."""
    with pytest.raises(UnsupportedModelError, match="FeatureListNet holds no encoder"):
        mmgraph.attach(feature_net("convnext", "cpu"))


def feature_net(name: str, device: str) -> Any:
    import timm

    arguments = {**MODELS[name].arguments, "features_only": True, "out_indices": (0, 1)}
    return timm.create_model(MODELS[name].name, **arguments).eval().to(device)


def resized(model: Any, side: tuple[int, int], device: str) -> None:
    """Change the input size on the CPU: resampling relative positions, timm mixes up devices."""
    model.to("cpu")
    model.set_input_size(img_size=side)
    model.to(device)


# timm's own resampling of relative positions.
@pytest.mark.filterwarnings("ignore:.*(searchsorted|multidimensional indexing):UserWarning")
def test_a_model_changes_while_it_is_attached(device: str) -> None:
    model = MODELS["swin"].build(device)
    changes: list[tuple[int, Callable[[], None]]] = [
        (56, lambda: None),
        (84, lambda: resized(model, (84, 84), device)),
        (84, lambda: model.reset_classifier(7)),
    ]
    with mmgraph.attach(model) as handle:
        for side, change in changes:
            change()
            x = images(2, (side, side), device)
            with mmgraph.encoders.eager_towers():
                eager = model(x)
            output, how = counted(handle, lambda x=x: model(x))
            assert how.from_graphs
            assert_same_output(output, eager)


def test_photographs_through_the_models_own_transform(device: str) -> None:
    import timm.data
    from PIL import Image
    from skimage import data

    model = MODELS["vit"].build(device)
    settings = timm.data.resolve_model_data_config(model)
    prepare = timm.data.create_transform(**{**settings, "input_size": (3, 64, 64)})
    photographs = [data.astronaut(), data.coffee(), data.chelsea()]
    x = torch.stack([prepare(Image.fromarray(p)) for p in photographs]).to(device)
    eager = model(x)
    assert not torch.allclose(eager[0], eager[1], rtol=1e-2)
    with mmgraph.attach(model) as handle:
        for count in (3, 1, 2):
            output, how = counted(handle, lambda count=count: model(x[:count]))
            assert how.from_graphs
            assert_same_output(output, eager[:count])
