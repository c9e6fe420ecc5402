from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mmgraph.bench import power_of_two
from mmgraph.bench.accuracy import output_error
from mmgraph.bench.power_of_two import Batch, fill, power_of_two_budgets, power_of_two_call
from mmgraph.bench.sizes import ImageSize
from mmgraph.bench.subject import open_subject
from mmgraph.manager.outputs import flatten_outputs
from mmgraph.recipes import load_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def replays_overwrite_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a CUDA graph do."""

    def captured(_: torch.device, call: Callable[[], Any]) -> Callable[[], list[torch.Tensor]]:
        outputs = flatten_outputs(call())

        def replay() -> list[torch.Tensor]:
            for output, new in zip(outputs, flatten_outputs(call()), strict=True):
                output.copy_(new)
            return outputs

        return replay

    monkeypatch.setattr(power_of_two, "captured", captured)


@pytest.mark.parametrize(
    ("smallest", "largest", "expected"),
    [
        (1, 8, (1, 2, 4, 8)),
        (196, 1000, (256, 512, 1024)),
        (256, 256, (256,)),
        (256, 257, (256, 512)),
    ],
)
def test_budgets_are_powers_of_two(smallest: int, largest: int, expected: tuple[int, ...]) -> None:
    assert power_of_two_budgets(smallest, largest) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100], [Batch((0,), 128)]),
        ([64], [Batch((0,), 64)]),
        ([65, 64, 20], [Batch((2, 1, 0), 256)]),  # ascending, all in one
        ([200, 60, 50], [Batch((2, 1), 128), Batch((0,), 256)]),  # the largest no longer fits
        ([256, 256], [Batch((0,), 256), Batch((1,), 256)]),
        ([128, 128, 128], [Batch((0, 1), 256), Batch((2,), 128)]),
        ([], []),
    ],
)
def test_items_are_filled_up_in_ascending_order(sizes: list[int], expected: list[Batch]) -> None:
    assert fill(sizes, (64, 128, 256)) == expected


def test_an_item_above_all_budgets_is_refused() -> None:
    with pytest.raises(ValueError, match="257"):
        fill([257], (64, 128, 256))


@pytest.mark.parametrize(
    ("name", "batch"),
    [("clip:tiny", 3), ("whisper:tiny", 2), ("timm:tiny", 40)],  # 40 rows are 32 and 8
)
def test_rows_are_what_eager_mode_gives(name: str, batch: int) -> None:
    with torch.no_grad(), open_subject(load_recipe(name), CPU, torch.float32) as subject:
        smallest, size = subject.sizes([], [1, batch])
        inputs = subject.inputs(size)
        call = power_of_two_call(subject, size, inputs, smallest)
        inputs.renew(7)
        assert output_error(call(), inputs.call_eager(subject.tower)) < 1e-5


@pytest.mark.parametrize("budgets", [None, (64, 128)], ids=["one batch", "two batches"])
@pytest.mark.parametrize("name", ["qwen2_5_vl:tiny", "qwen3_vl:tiny"])
def test_packed_images_are_what_eager_mode_gives(
    name: str, budgets: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if budgets is not None:
        monkeypatch.setattr(power_of_two, "power_of_two_budgets", lambda *_: budgets)
    with torch.no_grad(), open_subject(load_recipe(name), CPU, torch.float32) as subject:
        smallest, size = subject.sizes([ImageSize(56), ImageSize(96, 3)], [])
        inputs = subject.inputs(size)
        call = power_of_two_call(subject, size, inputs, smallest)
        for seed in (7, 8):
            inputs.renew(seed)
            assert output_error(call(), inputs.call_eager(subject.tower)) < 1e-5


def test_outputs_belong_to_the_caller() -> None:
    with torch.no_grad(), open_subject(load_recipe("clip:tiny"), CPU, torch.float32) as subject:
        smallest, size = subject.sizes([], [1, 3])
        inputs = subject.inputs(size)
        call = power_of_two_call(subject, size, inputs, smallest)
        first = call()
        before = [tensor.clone() for tensor in first]
        inputs.renew(7)
        call()
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))
