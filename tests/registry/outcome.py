"""What came out of an entry: how it was served, how exact it is, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mmgraph.stats import EncoderStats

__all__ = ["Outcome", "difference", "tensors"]


@dataclass
class Outcome:
    """Of one entry on one device.

    The limits are those of tests/contract: 1e-5 against eager mode in float32; in half precision
    a tenth more than eager mode's own error over all calls together, since the rounding of a model
    as small as these makes now the one and now the other err by half as much again. No single
    tensor may be further off than twice that.

    Attributes:
        modality: Of its inputs.
        inputs: Their kind.
        tower: Path of the tower in the model.
        class_name: Of the tower.
        graph: What served the last call: "budgets", "exact", "eager"; or "absent".
        why: Why no budget, or no graph at all, could.
        breaks: Submodules that run eagerly between the segments of its graph.
        error: The largest relative error of an output: against eager mode on the CPU, against the
            float32 twin on CUDA.
        eager_error: What eager mode's own is there; ``None`` on the CPU.
        hit_rate: Items served by replays, of all.
        problems: What isn't as in eager mode; empty if all is well.
    """

    modality: str
    inputs: str
    tower: str = ""
    class_name: str = ""
    graph: str = "eager"
    why: str = ""
    breaks: int = 0
    error: float = 0.0
    eager_error: float | None = None
    hit_rate: float = 0.0
    problems: list[str] = field(default_factory=list)
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _numbers: int = 0

    def to_dict(self) -> dict[str, Any]:
        data = {name: v for name, v in asdict(self).items() if not name.startswith("_")}
        for name in ("error", "eager_error", "hit_rate"):
            if data[name] is not None:
                data[name] = float(f"{data[name]:.2g}")
        return {name: value for name, value in data.items() if value not in ("", 0, None, [])}

    def blame(self, what: str, output: Any, eager: Any, truth: Any) -> None:
        """Take in one call's output, next to eager mode's and, where there is one, the truth."""
        if pytree.tree_structure(output) != pytree.tree_structure(eager):
            self.problems.append(f"{what}: another structure than eager mode's")
            return
        ours, theirs = tensors(output), tensors(eager)
        true = [None] * len(ours) if truth is None else tensors(truth)
        for triple in zip(ours, theirs, true, strict=True):
            problem = self._compare(*triple)
            if problem:
                self.problems.append(f"{what}: {problem}")
                return

    def _compare(self, ours: torch.Tensor, eager: torch.Tensor, true: torch.Tensor | None) -> str:
        if (ours.shape, ours.dtype) != (eager.shape, eager.dtype):
            return f"{tuple(ours.shape)} of {ours.dtype}, eager mode {tuple(eager.shape)}"
        if not ours.is_floating_point():
            return "" if torch.equal(ours, eager) else "whole numbers differ"
        error, limit, eager_error = _error(ours, eager), 1e-5, None
        if true is not None:
            error, eager_error = _error(ours, true), _error(eager, true)
            limit += (2.0 + 4 / max(1, ours.numel()) ** 0.5) * eager_error
            self._squares[0] += error**2
            self._squares[1] += eager_error**2
            self._numbers += ours.numel()
        if not error <= self.error:
            self.error, self.eager_error = error, eager_error
        return "" if error <= limit else f"error {error:.1e}, allowed {limit:.1e}"

    def judge(self) -> list[str]:
        """Compare what all calls together erred by, and return the problems."""
        ours, eager = (value**0.5 for value in self._squares)
        if ours > 1e-5 + (1.10 + 4 / max(1, self._numbers) ** 0.5) * eager:
            self.problems.append(f"all calls: error {ours:.1e}, eager mode's own {eager:.1e}")
        return self.problems

    def served(self, before: EncoderStats, after: EncoderStats) -> None:
        """Take in how a call was served."""
        replays = {graph.key: graph.replays for graph in before.graphs}
        grown = [g.key for g in after.graphs if g.replays > replays.get(g.key, 0)]
        missed = sum(after.misses.values()) > sum(before.misses.values())
        if missed or not grown:
            self.graph = "eager"
        else:
            self.graph = "exact" if any(key.exact is not None for key in grown) else "budgets"


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN must be where NaN is."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def difference(output: Any, eager: Any) -> float:
    """The largest relative error of a tensor; infinite where not even the structure is the same."""
    if pytree.tree_structure(output) != pytree.tree_structure(eager):
        return float("inf")
    return max(map(_error, tensors(output), tensors(eager)), default=0.0)
