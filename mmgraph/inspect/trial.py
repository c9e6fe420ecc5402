"""Running the towers of a model once: small or tiny, random weights, the trace backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from mmgraph.attachment import attach
from mmgraph.bench.inputs import full_item, tower_inputs
from mmgraph.config import GraphConfig
from mmgraph.encoders import Tower, encoder_for, find_towers
from mmgraph.errors import UnsupportedModelError
from mmgraph.graphs import flatten
from mmgraph.inspect.source import Source
from mmgraph.recipes import Recipe, load_recipe
from mmgraph.stats import EncoderStats

__all__ = ["CallResult", "Trial", "try_towers"]

_MAX_PARAMETERS = 50_000_000
_NUM_CALLS = 3
_TOLERANCE = 1e-4
_BLANK_STD = 0.02
_Example = Callable[[int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of an attached tower.

    Attributes:
        served: "budget" (a graph of a budget), "exact" (a graph of its own) or "eager".
        reason: Why eager.
        error: Largest difference from eager mode, relative to the largest number; infinite where
            not even the shapes are the same.
    """

    served: Literal["budget", "exact", "eager"]
    reason: str | None
    error: float

    @property
    def equal(self) -> bool:
        """Whether it is what eager mode gives, up to rounding."""
        return self.error <= _TOLERANCE


@dataclass(frozen=True, slots=True)
class Trial:
    """Calls of one method of a tower, all of the same sizes.

    Attributes:
        tower: Name of the tower and the method.
        what: What was built.
        calls: The calls in their order; empty if there were none.
        not_run: Why there were none.
    """

    tower: str
    what: str
    calls: tuple[CallResult, ...] = ()
    not_run: str | None = None

    @property
    def replayed(self) -> bool:
        """Whether the last call came from a graph."""
        return bool(self.calls) and self.calls[-1].served != "eager"

    @property
    def ok(self) -> bool:
        """Whether every call equals eager mode."""
        return all(call.equal for call in self.calls)


def try_towers(source: Source, model: nn.Module) -> tuple[Trial, ...]:
    """Run each tower of `model`, which was built from `source` without weights.

    A recipe stands for its family's tiny model; others are run as they are if they are small.
    """
    if source.recipe is not None:
        tiny = load_recipe(f"{source.recipe.family}:tiny")
        return _try_all(tiny.build_model(), tiny.name, tiny)
    trials: list[Trial] = []
    for tower in find_towers(model):
        count = sum(p.numel() for p in tower.module.parameters())
        what = f"{type(tower.module).__name__}, {count / 1e6:.1f} M parameters"
        if count >= _MAX_PARAMETERS:
            limit = f"only towers below {_MAX_PARAMETERS // 10**6} M are built"
            trials.append(Trial(tower.name, what, not_run=limit))
            continue
        try:
            twin = _with_weights(source, tower)
        except Exception as error:  # whatever a class does to a config of the user's
            trials.append(Trial(tower.name, what, not_run=f"it can't be built alone: {error}"))
            continue
        trials += _try_all(twin, what, None)
    return tuple(trials)


def _with_weights(source: Source, tower: Tower) -> nn.Module:
    """The tower with random weights, none of them blank, on the CPU in float32."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        kind: Any = type(tower.module)
        if hasattr(kind, "_from_config"):
            twin = kind._from_config(tower.module.config, dtype=torch.float32).eval()
        else:
            twin = source.build("cpu", torch.float32)
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.numel() and not float(parameter.std(correction=0)) > 0:
                    parameter.normal_(std=_BLANK_STD)
    return cast(nn.Module, twin)


def _try_all(model: nn.Module, what: str, recipe: Recipe | None) -> tuple[Trial, ...]:
    return tuple(
        _try(model, tower, method, what, recipe)
        for tower in find_towers(model)
        for method in tower.methods
    )


@torch.no_grad()
def _try(model: nn.Module, tower: Tower, method: str, what: str, recipe: Recipe | None) -> Trial:
    encoder = encoder_for(tower, method)
    run = getattr(tower.module, method)
    try:
        example = _example(tower, encoder.example_call, recipe)
        calls = [example(seed) for seed in range(_NUM_CALLS)]
        expected = [run(**_copied(call)) for call in calls]
    except UnsupportedModelError as error:
        return Trial(encoder.name, what, not_run=str(error))
    except Exception as error:  # the tower wants more than an example holds
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Trial(encoder.name, what, not_run=f"the example is no full call ({text})"[:200])
    results = []
    with attach(model, GraphConfig(backend="trace")) as handle:
        attached = getattr(tower.module, method)
        for call, eager in zip(calls, expected, strict=True):
            before = handle.stats_by_tower()[encoder.name]
            output = attached(**_copied(call))
            after = handle.stats_by_tower()[encoder.name]
            results.append(CallResult(*_served(before, after), error=_difference(output, eager)))
    return Trial(encoder.name, what, tuple(results))


def _example(
    tower: Tower, example_call: Callable[[], dict[str, Any]], recipe: Recipe | None
) -> _Example:
    """Calls of the same sizes, each with contents of its own."""
    if recipe is not None and recipe.inputs and tower.name == recipe.encoder_path:
        config = tower.module.config
        fixed = "length" in recipe.input_facts
        sizes = [full_item(recipe, config)] if fixed else _sizes(recipe, config)

        def from_recipe(seed: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(seed)
            return dict(tower_inputs(recipe, config, sizes, generator=generator))

        return from_recipe
    first = example_call()

    def from_example(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
            else value
            for name, value in first.items()
        }

    return from_example


def _sizes(recipe: Recipe, config: Any) -> list[tuple[int, ...]]:
    """Two images or clips where items have sizes of their own."""
    if "multiple" in recipe.input_facts:
        return [(2 * recipe.input_facts["multiple"],), (recipe.input_facts["multiple"],)]
    merge = recipe.input_facts.get("merge", 1)
    return [(1, 4 * merge, 4 * merge), (1, 2 * merge, 4 * merge)]


def _copied(call: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in call.items()}


def _served(
    before: EncoderStats, after: EncoderStats
) -> tuple[Literal["budget", "exact", "eager"], str | None]:
    for reason, count in after.misses.items():
        if count > before.misses.get(reason, 0):
            return "eager", reason.value
    replays = {graph.key: graph.replays for graph in before.graphs}
    own = any(g.key.exact and g.replays > replays.get(g.key, 0) for g in after.graphs)
    return ("exact" if own else "budget"), None


def _difference(output: Any, eager: Any) -> float:
    """See :class:`CallResult`."""
    if type(output) is not type(eager):
        return float("inf")
    ours, theirs = flatten(output)[0], flatten(eager)[0]
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return float("inf")
    errors = [_error(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(errors, default=0.0)


def _error(ours: torch.Tensor, eager: torch.Tensor) -> float:
    a, b = ours.double(), eager.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    scale = float(b.nan_to_num().abs().max()) or 1.0
    return float((a - b).nan_to_num().abs().max()) / scale
