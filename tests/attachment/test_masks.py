"""Towers with a mask: a graph serves only if it is right for full and for partial masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_tracing

import mmgraph
from mmgraph import GraphConfig, InvalidInputError, Reason


class MaskedTower(PreTrainedModel):
    """Scales rows by how much of their mask is set."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(8, 8)

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(pixel_values.flatten(1))
        return y if mask is None else y * mask.to(y.dtype).mean(dim=1, keepdim=True)


class CausalUnlessMasked(MaskedTower):
    """Leaves out a mask that masks nothing, except while it is traced, and then does something else
    without it: as the vision tower of Phi-4-multimodal in transformers."""

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(pixel_values.flatten(1))
        if mask is None or (not is_tracing(mask) and bool(mask.all())):
            return y.cumsum(dim=1)
        return y * mask.to(y.dtype).mean(dim=1, keepdim=True)


class FullMasksOnly(MaskedTower):
    """Can't answer a partial mask at all."""

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and not is_tracing(mask) and not bool(mask.all()):
            raise ValueError("every patch must be there")
        return self.linear(pixel_values.flatten(1))


def call(rows: int = 2, *, full: bool = True) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, 4, dtype=torch.bool)
    mask[-1, 2:] = full
    return {"pixel_values": torch.randn(rows, 2, 4), "mask": mask}


def make(kind: type[MaskedTower]) -> Any:
    torch.manual_seed(0)
    return kind(PretrainedConfig()).eval()


@torch.no_grad()
def test_a_mask_is_an_input_of_the_graph() -> None:
    tower = make(MaskedTower)
    calls = [call(2), call(2, full=False), call(1), call(3, full=False)]
    expected = [tower(**c) for c in calls]
    with mmgraph.attach(tower, GraphConfig(row_budgets=(1, 2, 4))) as handle:
        for c, e in zip(calls, expected, strict=True):
            torch.testing.assert_close(tower(**c), e)
        assert handle.stats().hits == handle.stats().items == 8


@pytest.mark.parametrize("kind", [CausalUnlessMasked, FullMasksOnly])
@torch.no_grad()
def test_a_graph_that_is_right_for_some_masks_only_never_serves(
    kind: type[MaskedTower], caplog: pytest.LogCaptureFixture
) -> None:
    tower = make(kind)
    calls = [call(2), call(2)] if kind is FullMasksOnly else [call(2), call(2, full=False)]
    expected = [tower(**c) for c in calls]
    with mmgraph.attach(tower, GraphConfig(row_budgets=(1, 2, 4))) as handle:
        for c, e in zip(calls, expected, strict=True):
            torch.testing.assert_close(tower(**c), e)
        # The very same mask again is another matter: that call gets a graph of its own.
        again = kind is FullMasksOnly
        assert handle.stats().misses == {Reason.CAPTURE_FAILED: 2 if again else 4}
        assert [graph.key.exact is not None for graph in handle.stats().graphs] == [True] * again
        plain = torch.randn(2, 2, 4)
        tower(plain)  # without a mask there is one way only
        assert handle.stats().hits == (4 if again else 2)
    assert caplog.text.count("runs in eager mode") == 1
    assert (kind is FullMasksOnly) or "differs from eager mode by" in caplog.text


class PackedAlongOne(MaskedTower):
    """Takes its patches as (1, T, D), as PaddleOCR-VL's tower does."""

    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return self.linear(pixel_values)


@torch.no_grad()
def test_patches_along_another_dimension_are_no_contradiction() -> None:
    tower = make(PackedAlongOne)
    patches, grid = torch.randn(1, 12, 8), torch.tensor([[1, 4, 3]])
    expected = tower(patches, grid_thw=grid)
    with mmgraph.attach(tower) as handle:
        assert torch.equal(tower(patches, grid_thw=grid), expected)
        assert handle.stats().misses == {Reason.UNSUPPORTED_CALL: 1}
        with pytest.raises(InvalidInputError, match="stands for 12 patches"):
            tower(torch.randn(1, 11, 8), grid_thw=grid)


class Starred(MaskedTower):
    """Takes further positional arguments that have no names."""

    def forward(self, pixel_values: torch.Tensor, *more: float) -> torch.Tensor:
        return self.linear(pixel_values.flatten(1)) * (1 + sum(more))


@torch.no_grad()
@pytest.mark.parametrize("eager", [False, True])
def test_arguments_without_a_name_run_in_eager_mode_and_are_counted(eager: bool) -> None:
    tower, pixels = make(Starred), torch.randn(2, 2, 4)
    expected = tower(pixels, 1.0, 2.0)
    with mmgraph.attach(tower, GraphConfig(enforce_eager=eager)) as handle:
        assert torch.equal(tower(pixels, 1.0, 2.0), expected)
        reason = Reason.ENFORCE_EAGER if eager else Reason.UNSUPPORTED_CALL
        assert handle.stats().misses == {reason: 1}
        assert handle.stats().calls == 1


class ReadsLengths(MaskedTower):
    """Reads lengths off its mask on the host; where there are none it would divide by zero."""

    def forward(self, pixel_values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        parts = 12 // int(mask.sum(dim=1).max())
        return super().forward(pixel_values, mask) * parts


@torch.no_grad()
def test_a_capture_is_tried_on_a_mask_that_masks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU the quotient would be a number of billions, and a list of that length follows."""
    tower = make(ReadsLengths)
    with mmgraph.attach(tower, GraphConfig(row_budgets=(1, 2, 4))) as handle:
        for _ in range(2):
            arguments = call(2)
            expected = MaskedTower.forward(tower, **arguments) * 3
            torch.testing.assert_close(tower(**arguments), expected)
        assert handle.stats().misses, "reading a mask on the host has no graph of a budget"
    assert "ZeroDivisionError" not in caplog.text
