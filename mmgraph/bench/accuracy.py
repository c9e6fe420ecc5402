"""Whether a fast output is also the right one.

In half precision no two kernels agree bit for bit, so an output is judged by its distance from a
float32 twin, beside the distance of eager mode from it. In float32 it is judged against eager.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmgraph.bench.names import DEFAULT, EAGER, EXACT
from mmgraph.manager.outputs import flatten_outputs

__all__ = ["Accuracy", "compare", "output_error", "relative_error"]

_MAX_RATIO = 1.10
_MAX_BASELINE_RATIO = 1.5
_MAX_FLOAT32_ERROR = 1e-5
_MIN_ELEMENTS = 4096  # a bound of 10 % on the error of fewer elements is a bound on noise
_NOT_FINITE = sys.float_info.max  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Relative errors in the Frobenius norm, by variant.

    Attributes:
        to_reference: Against the float32 twin.
        to_eager: Against eager mode in the same dtype.
    """

    to_reference: Mapping[str, float]
    to_eager: Mapping[str, float]

    def matches(self, dtype: torch.dtype) -> bool:
        """Whether what mmgraph returns is as good as what eager mode returns."""
        return all(self._matches(name, dtype) for name in (EXACT, DEFAULT))

    def wrong(self, dtype: torch.dtype) -> dict[str, float]:
        """Errors of other variants that are too large for their times to mean anything."""
        errors = self.to_eager if dtype == torch.float32 else self.to_reference
        most = max(100 * _MAX_FLOAT32_ERROR, _MAX_BASELINE_RATIO * errors[EAGER])
        others = {n: e for n, e in errors.items() if n not in (EAGER, EXACT, DEFAULT)}
        return {name: error for name, error in others.items() if error > most}

    def _matches(self, name: str, dtype: torch.dtype) -> bool:
        if dtype == torch.float32:
            return self.to_eager[name] <= _MAX_FLOAT32_ERROR
        # An eager mode that is all wrong excuses nothing: hence the 1.
        return self.to_reference[name] <= min(1.0, _MAX_RATIO * self.to_reference[EAGER])


def compare(outputs: Mapping[str, Any], reference: Any) -> Accuracy:
    """Compare the outputs of all variants for the same inputs."""
    return Accuracy(
        {name: output_error(output, reference) for name, output in outputs.items()},
        {name: output_error(output, outputs[EAGER]) for name, output in outputs.items()},
    )


def output_error(output: Any, truth: Any) -> float:
    """The worst relative error over the tensors of an output that are large enough to judge."""
    pairs = list(zip(flatten_outputs(output), flatten_outputs(truth), strict=True))
    large = [pair for pair in pairs if pair[1].numel() >= _MIN_ELEMENTS]
    judged = large or [max(pairs, key=lambda pair: pair[1].numel())]
    return max(relative_error(*pair) for pair in judged)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """``|value - truth| / |truth|``; the largest float where that is no number."""
    if value.shape != truth.shape:
        return _NOT_FINITE
    a, b = value.double(), truth.double()
    error = float((a - b).norm() / b.norm())
    return error if math.isfinite(error) else _NOT_FINITE
