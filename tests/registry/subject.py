"""A registered model on one device, its float32 twin, and calls of it."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mmgraph import GraphConfig, Handle, attach
from mmgraph.encoders import Tower, eager_towers, find_towers
from mmgraph.stats import EncoderStats
from tests.registry.build import build, identity, require
from tests.registry.entry import Call, Draw, Entry, Size

__all__ = ["Subject", "Subjects"]

_KEPT = 4


class Subject:
    """An entry on a device: float32 on the CPU, bfloat16 with a float32 twin on CUDA."""

    def __init__(self, entry: Entry, device: str, model: nn.Module, twin: nn.Module | None) -> None:
        self.entry = entry
        self.device = device
        self.model = model
        self._twin = twin
        self._draw = Draw()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._twin is None else torch.bfloat16

    def in_float32(self) -> Subject:
        """The same with the float32 twin as its model."""
        if self._twin is None:
            return self
        return Subject(self.entry, self.device, self._twin, None)

    @property
    def config(self) -> GraphConfig:
        """One graph of budgets, which smaller calls pad and larger ones fill several times."""
        return GraphConfig(
            row_budgets=(self.entry.budget,),
            token_budgets=(self.entry.budget,),
            max_items=1,
            exact_after=0,
            compile_blocks=False,  # it takes seconds a model
            choose_attention=False,  # what is measured on models so small says nothing
        )

    def attach(self) -> Handle:
        return attach(self.model, self.config)

    def tower(self) -> Tower:
        """The one that the entry is about, as it is found from the whole model."""
        found = [tower for tower in find_towers(self.model) if not tower.main_input]
        mine = list(filter(self.is_about, found))
        assert len(mine) == 1, f"found {[t.name for t in found]}, registered {self.entry.tower!r}"
        assert self.entry.modality in mine[0].modalities, mine[0].modalities
        return mine[0]

    def stats(self, handle: Handle) -> EncoderStats:
        """Counters of all towers, but not of what resamples their output."""
        resamplers = {tower.name for tower in find_towers(self.model) if tower.main_input}
        counted = handle.stats_by_tower().items()
        return EncoderStats.of_all(stats for name, stats in counted if name not in resamplers)

    def is_about(self, tower: Tower) -> bool:
        path = self.entry.tower
        return path is None or f".{tower.name}".endswith(f".{path}")

    def call(self, sizes: Sequence[Size]) -> Call:
        """Arguments with fresh contents, where processors of transformers would put them."""
        made = self.entry.inputs.make(self.model, sizes, self._draw)
        return {name: self._moved(value) for name, value in made.items()}

    def run(self, call: Call) -> Any:
        return _called(self._function(self.model), _copied(call))

    def eager(self, call: Call) -> Any:
        with eager_towers():
            return self.run(call)

    def truth(self, call: Call) -> Any:
        """What the twin returns, or ``None``: in float32 eager mode is as good as any."""
        if self._twin is None:
            return None
        wide = {name: _widened(value) for name, value in _copied(call).items()}
        return _called(self._function(self._twin), wide)

    def _function(self, model: nn.Module) -> Callable[..., Any]:
        through = self.entry.through
        if through == "tower":
            path = self.tower().name
            return operator.attrgetter(path)(model) if path else model
        if through == "features":
            through = f"get_{self.entry.modality}_features"
        function: Callable[..., Any] = getattr(model, through)
        return function

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)


class Subjects:
    """Models by entry and device: each is built once, and the last few are kept."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, str], tuple[nn.Module, nn.Module | None]]
        self._models = OrderedDict()

    def get(self, entry: Entry, device: str) -> Subject:
        """The entry on a device; raises ``Absent`` where the installed library can't run it."""
        require(entry)
        key = (identity(entry), device)
        if key not in self._models:
            self._models[key] = _built(entry, device)
            if len(self._models) > _KEPT:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return Subject(entry, device, *self._models[key])


def _built(entry: Entry, device: str) -> tuple[nn.Module, nn.Module | None]:
    if device == "cpu":
        return build(entry), None
    model = build(entry, torch.bfloat16).to(device)
    return model, copy.deepcopy(model).float()


def _called(function: Callable[..., Any], call: Call) -> Any:
    """The main input goes first: what it is called differs between versions."""
    (_, main), *others = call.items()
    return function(main, **dict(others))


def _copied(call: Call) -> Call:
    """A model may write to what it gets."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in call.items()}


def _widened(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floating else value
