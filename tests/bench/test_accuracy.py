from __future__ import annotations

import pytest
import torch

from mmgraph.bench.accuracy import Accuracy, compare, output_error, relative_error
from mmgraph.bench.names import DEFAULT, EAGER, EXACT, HAND_MADE, METADATA


def test_an_error_is_relative_to_the_truth() -> None:
    truth = torch.full((10,), 2.0)
    assert relative_error(truth * 1.5, truth) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [torch.tensor([1.0, float("nan")]), torch.ones(3)])
def test_nan_and_a_wrong_shape_are_as_wrong_as_can_be(value: torch.Tensor) -> None:
    assert relative_error(value, torch.ones(2)) > 1e300


def test_small_tensors_are_not_judged_beside_large_ones() -> None:
    small, large = torch.ones(100), torch.ones(4096)
    assert output_error((small * 2, large * 1.1), (small, large)) == pytest.approx(0.1)
    assert output_error((large * 1.2, large * 1.1), (large, large + 0)) == pytest.approx(0.2)


def test_of_small_tensors_alone_the_largest_is_judged() -> None:
    assert output_error(
        (torch.ones(10) * 3, torch.ones(20) * 1.1), (torch.ones(10), torch.ones(20))
    ) == pytest.approx(0.1)


def test_outputs_are_compared_with_both_truths() -> None:
    truth = torch.ones(5000)
    outputs = {EAGER: truth * 1.1, EXACT: truth * 1.1, DEFAULT: truth}
    accuracy = compare(outputs, truth)
    assert accuracy.to_reference == pytest.approx({EAGER: 0.1, EXACT: 0.1, DEFAULT: 0.0}, abs=1e-6)
    assert accuracy.to_eager == pytest.approx({EAGER: 0, EXACT: 0, DEFAULT: 1 / 11}, abs=1e-6)


@pytest.mark.parametrize(
    ("eager", "exact", "default", "expected"),
    [
        (0.010, 0.011, 0.010, True),
        (0.010, 0.0111, 0.010, False),  # more than a tenth worse than eager
        (0.010, 0.010, 0.0111, False),
        (1e308, 1e308, 1e308, False),  # all wrong together is no match
    ],
)
def test_half_precision_is_judged_beside_eager(
    eager: float, exact: float, default: float, expected: bool
) -> None:
    accuracy = Accuracy({EAGER: eager, EXACT: exact, DEFAULT: default}, {})
    assert accuracy.matches(torch.bfloat16) is expected


@pytest.mark.parametrize(("error", "expected"), [(1e-5, True), (1.1e-5, False)])
def test_float32_is_judged_against_eager(error: float, expected: bool) -> None:
    accuracy = Accuracy({}, {EXACT: 0.0, DEFAULT: error})
    assert accuracy.matches(torch.float32) is expected


def test_a_baseline_that_is_wrong_is_named_however_it_is_off() -> None:
    errors = {EAGER: 0.02, EXACT: 0.5, DEFAULT: 0.5, HAND_MADE: 0.9, METADATA: 0.021}
    accuracy = Accuracy(errors, dict.fromkeys(errors, 0.0))
    assert accuracy.wrong(torch.bfloat16) == {HAND_MADE: 0.9}
    assert accuracy.wrong(torch.float32) == {}
