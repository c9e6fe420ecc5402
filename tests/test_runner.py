"""The runner: neighbours of one modality are one batch, and outputs come back in order."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmgraph import ConfigError, EncoderCudaGraphManager, EncoderRunner, GraphConfig, MMGraphError
from mmgraph.runner import EncoderManager, ModalityTiming, batch_items
from tests.manager.engine import call_of, lengths_of, make_encoder

CPU = torch.device("cpu")
Item = dict[str, Any]


class Model:
    """Encodes an item as its patches, twice as large, and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def embed_multimodal(self, **mm_kwargs: Any) -> Sequence[torch.Tensor]:
        lengths = lengths_of(mm_kwargs)
        self.batches.append(lengths)
        return [2 * patches for patches in mm_kwargs["patches"].split(lengths)]


class Manager(Model):
    """Serves images only, as three times their patches."""

    def __init__(self, captured: bool = True) -> None:
        super().__init__()
        self.captured = captured
        self.pools: list[Any] = []

    def is_captured(self) -> bool:
        return self.captured

    def supports_modality(self, modality: str) -> bool:
        return modality == "image"

    def capture(self, graph_pool: Any | None = None) -> int:
        self.pools.append(graph_pool)
        self.captured = True
        return 123

    def clear(self) -> None:
        self.captured = False

    def execute(self, mm_kwargs: Any) -> Sequence[torch.Tensor]:
        return [1.5 * output for output in self.embed_multimodal(**mm_kwargs)]


def item(length: int, width: int = 3, **more: Any) -> Item:
    """An item whose values are its length."""
    return {
        "patches": torch.full((length, width), float(length)),
        "lengths": torch.tensor([length]),
        **more,
    }


def images(*lengths: int) -> list[tuple[str, Item]]:
    return [("image", item(n)) for n in lengths]


def videos(*lengths: int) -> list[tuple[str, Item]]:
    return [("video", item(n)) for n in lengths]


def test_both_are_what_the_runner_asks_for() -> None:
    manager = EncoderCudaGraphManager(GraphConfig(), CPU, torch.float32, make_encoder())
    assert isinstance(manager, EncoderManager)
    assert isinstance(Manager(), EncoderManager)


@pytest.mark.parametrize(
    ("pairs", "batches"),
    [
        ([], []),  # nothing
        (images(4), [[4]]),  # one
        (images(4, 2, 6), [[4, 2, 6]]),  # neighbours of one modality
        ([*images(4), *videos(2)], [[4], [2]]),  # two modalities
        ([*images(4), *videos(2), *images(6)], [[4], [2], [6]]),  # not sorted: order is kept
        ([*images(4, 2), *videos(2, 2, 8), *images(6)], [[4, 2], [2, 2, 8], [6]]),
        # what can't be concatenated is a batch of its own
        ([*images(4), ("image", item(2, width=5))], [[4], [2]]),  # another width
        ([*images(4), ("image", item(2, dtype=1))], [[4], [2]]),  # another field
        ([("image", item(4, scale=1)), ("image", item(2, scale=2))], [[4], [2]]),  # a constant
        ([("image", item(4, scale=1)), ("image", item(2, scale=1))], [[4, 2]]),  # the same one
    ],
)
def test_neighbours_that_go_together_are_one_batch(
    pairs: list[tuple[str, Item]], batches: list[list[int]]
) -> None:
    model = Model()
    outputs = EncoderRunner(model).execute_mm_encoder(pairs)
    assert model.batches == batches
    assert [len(output) for output in outputs] == [int(i["lengths"]) for _, i in pairs]
    assert all((output == 2 * len(output)).all() for output in outputs)


def test_items_of_another_dtype_are_a_batch_of_their_own() -> None:
    model = Model()
    half = {**item(4), "patches": item(4)["patches"].half()}
    outputs = EncoderRunner(model).execute_mm_encoder([*images(4), ("image", half)])
    assert model.batches == [[4], [4]]
    assert [o.dtype for o in outputs] == [torch.float32, torch.float16]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # rows of patches, and a grid of one row each
        (
            [{"x": torch.ones(2, 3), "grid": torch.tensor([[1, 2, 1]])}] * 2,
            {"x": (4, 3), "grid": (2, 3)},
        ),
        # a grid without its dimension of items
        (
            [{"x": torch.ones(2, 3), "grid": torch.tensor([1, 2, 1])}] * 2,
            {"x": (4, 3), "grid": (2, 3)},
        ),
        # pixels
        ([{"x": torch.ones(1, 3, 8, 8)}] * 3, {"x": (3, 3, 8, 8)}),
        # tiles of several images
        ([{"x": torch.ones(2, 3, 8, 8)}, {"x": torch.ones(5, 3, 8, 8)}], {"x": (7, 3, 8, 8)}),
    ],
)
def test_tensors_are_concatenated_by_rows(
    items: list[Item], expected: dict[str, tuple[int, ...]]
) -> None:
    assert {name: tuple(t.shape) for name, t in batch_items(items).items()} == expected


def test_other_fields_are_passed_on() -> None:
    batch = batch_items([item(2, scale=0.5, name="a"), item(4, scale=0.5, name="a")])
    assert (batch["scale"], batch["name"]) == (0.5, "a")


def test_lengths_of_one_number_an_item_are_one_a_row() -> None:
    assert batch_items([item(2), item(4)])["lengths"].shape == (2, 1)


@pytest.mark.parametrize(
    ("manager", "factors"),
    [
        (None, {"image": 2, "video": 2}),  # no manager
        (Manager(captured=False), {"image": 2, "video": 2}),  # nothing captured
        (Manager(), {"image": 3, "video": 2}),  # it doesn't take videos
    ],
)
def test_without_graphs_for_a_modality_the_model_encodes_it(
    manager: Manager | None, factors: dict[str, int]
) -> None:
    runner = EncoderRunner(Model(), manager)
    outputs = runner.execute_mm_encoder([*images(4), *videos(2)])
    assert [o[0, 0].item() for o in outputs] == [4 * factors["image"], 2 * factors["video"]]


def test_capture_and_clear_are_the_managers() -> None:
    manager = Manager(captured=False)
    runner = EncoderRunner(Model(), manager)
    assert not runner.has_cudagraph()
    assert runner.capture((0, 1)) == 123
    assert manager.pools == [(0, 1)]
    assert runner.has_cudagraph()
    runner.clear()
    assert not runner.has_cudagraph()


def test_without_a_manager_there_is_nothing_to_capture() -> None:
    runner = EncoderRunner(Model())
    assert runner.capture() == 0
    assert not runner.has_cudagraph()
    runner.clear()


def test_a_real_manager_serves_mixed_modalities_and_sizes() -> None:
    encoder = make_encoder()
    config = GraphConfig(token_budgets=(8, 16))
    manager = EncoderCudaGraphManager(config, CPU, torch.float32, encoder)
    pairs, expected = [], []
    for seed, (modality, length) in enumerate(
        [("image", 4), ("image", 20), ("video", 8), ("image", 2), ("image", 6)]
    ):
        call = call_of([length], seed)
        expected += encoder.embed_multimodal(**call)
        pairs.append((modality, call))
    outputs = EncoderRunner(encoder, manager).execute_mm_encoder(pairs)
    for output, item_ in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, item_, rtol=1e-5, atol=1e-5)
    assert (manager.stats().calls, manager.stats().items) == (3, 5)


class Returns:
    """A model that returns what it was told to."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def embed_multimodal(self, **_: Any) -> Any:
        return self.output


@pytest.mark.parametrize(
    ("output", "message"),
    [
        # too few
        (
            [torch.zeros(4, 8)],
            "the encoder returned 1 outputs for 2 image items; it must return one an item",
        ),
        # too many
        (
            [torch.zeros(4, 8)] * 3,
            "the encoder returned 3 outputs for 2 image items; it must return one an item",
        ),
        # nothing
        ([], "the encoder returned 0 outputs for 2 image items; it must return one an item"),
        # one tensor for all, as many rows as items by chance
        (
            torch.zeros(2, 8),
            "output 0 of the image encoder must be a tensor (tokens, D), got (8,)",
        ),
        # a row that lost its dimension
        (
            [torch.zeros(4, 8), torch.zeros(8)],
            "output 1 of the image encoder must be a tensor (tokens, D), got (8,)",
        ),
        # no tensor
        (
            [torch.zeros(4, 8), [0.0]],
            "output 1 of the image encoder must be a tensor (tokens, D), got list",
        ),
    ],
)
def test_anything_but_one_tensor_an_item_is_an_error(output: Any, message: str) -> None:
    with pytest.raises(MMGraphError, match=f"^{re.escape(message)}$"):
        EncoderRunner(Returns(output)).execute_mm_encoder(images(4, 2))


def test_no_output_at_all_is_an_error_of_ours() -> None:
    with pytest.raises(MMGraphError, match="image"):
        EncoderRunner(Returns(None)).execute_mm_encoder(images(4, 2))


def test_one_tensor_of_equal_items_is_as_good_as_a_list() -> None:
    outputs = EncoderRunner(Returns(torch.zeros(2, 4, 8))).execute_mm_encoder(images(4, 2))
    assert [o.shape for o in outputs] == [(4, 8)] * 2


def test_gradients_are_off() -> None:
    encoder = make_encoder().requires_grad_(True)
    call = call_of([4])
    (output,) = EncoderRunner(encoder).execute_mm_encoder([("image", call)])
    assert torch.is_grad_enabled()
    assert not output.requires_grad


def test_without_timing_there_are_no_timings() -> None:
    runner = EncoderRunner(Model())
    runner.execute_mm_encoder(images(4))
    message = re.escape("this runner keeps no timings: make it with timing=True")
    with pytest.raises(ConfigError, match=f"^{message}$"):
        runner.timings()


class Slow(Model):
    def embed_multimodal(self, **mm_kwargs: Any) -> Sequence[torch.Tensor]:
        time.sleep(0.01)
        return super().embed_multimodal(**mm_kwargs)


def test_timings_are_kept_by_modality() -> None:
    runner = EncoderRunner(Slow(), timing=True)
    assert runner.timings() == {}
    runner.execute_mm_encoder([*images(4, 2), *videos(2), *images(6)])
    timings = runner.timings()
    assert {m: (t.groups, t.items) for m, t in timings.items()} == {
        "image": (2, 3),
        "video": (1, 1),
    }
    assert 20 <= timings["image"].total_ms < 10_000
    assert 10 <= timings["video"].total_ms < 10_000
    runner.execute_mm_encoder(videos(2))
    assert runner.timings()["video"].groups == 2
    assert runner.timings()["image"] == timings["image"]


def test_a_group_that_failed_is_not_timed() -> None:
    runner = EncoderRunner(Returns([]), timing=True)
    runner.model = Model()
    runner.execute_mm_encoder(images(4))
    runner.model = Failing()
    with pytest.raises(ZeroDivisionError):
        runner.execute_mm_encoder(images(4))
    timing = runner.timings()["image"]
    assert (timing.groups, timing.items) == (1, 1)


class Failing:
    def embed_multimodal(self, **_: Any) -> Any:
        return 1 / 0


@pytest.mark.gpu
def test_on_a_gpu_the_time_is_that_of_the_device() -> None:
    class Sleeps(Model):
        def embed_multimodal(self, **mm_kwargs: Any) -> Sequence[torch.Tensor]:
            torch.cuda._sleep(50_000_000)
            return super().embed_multimodal(**mm_kwargs)

    runner = EncoderRunner(Sleeps(), device=torch.device("cuda"), timing=True)
    started = time.perf_counter()
    runner.execute_mm_encoder(images(4))
    launched = (time.perf_counter() - started) * 1e3
    timing = runner.timings()["image"]
    assert isinstance(timing, ModalityTiming)
    assert timing.total_ms > 5
    assert launched < timing.total_ms
