"""The short form of the contract: a few calls of an attached model, and leaving it as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmgraph import Handle
from mmgraph.encoders import find_towers
from mmgraph.graphs import BreakableGraph
from mmgraph.stats import EncoderStats
from tests.registry.build import why_eager
from tests.registry.entries.notes import NOTES
from tests.registry.entry import Call, Size
from tests.registry.outcome import Outcome, tensors
from tests.registry.subject import Subject

__all__ = ["examine", "with_nan"]


@torch.no_grad()
def examine(subject: Subject, outcome: Outcome) -> None:
    """Fill `outcome`; whatever goes wrong is among its problems."""
    eager = why_eager(subject.entry)
    if eager and not find_towers(subject.model):
        outcome.why = f"no tower is found: {eager}"
        return
    tower = subject.tower()
    outcome.tower, outcome.class_name = tower.name, type(tower.module).__name__
    several = subject.entry.inputs.mixed
    subject.eager(subject.call(several))  # what it makes when it is first used isn't ours
    before = _state(subject)
    with _warnings() as warnings, subject.attach() as handle:
        for sizes in (several, several, several[:1], several):
            _check_call(subject, handle, outcome, sizes)
        _check_nan(subject, outcome, several)
        stats = subject.stats(handle)
        outcome.hit_rate = stats.hits / max(1, stats.items)
        outcome.breaks = _breaks(handle)
        if outcome.graph != "budgets":
            name = subject.entry.name
            outcome.why = eager or NOTES.get(name) or _why(warnings, stats)
    if _state(subject) != before:
        outcome.problems.append("detaching didn't leave the model as it was")
    outcome.judge()


def _check_call(subject: Subject, handle: Handle, outcome: Outcome, sizes: Sequence[Size]) -> None:
    call = subject.call(sizes)
    eager, truth = subject.eager(call), subject.truth(call)
    before = subject.stats(handle)
    output = subject.run(call)
    outcome.served(before, subject.stats(handle))
    outcome.blame(f"{len(sizes)} items by {outcome.graph}", output, eager, truth)


def _check_nan(subject: Subject, outcome: Outcome, sizes: Sequence[Size]) -> None:
    """NaN in the first item reaches what it reaches in eager mode, and nothing else."""
    if len(sizes) < 2 or not subject.entry.inputs.may_be_nan:
        return
    call = with_nan(subject.call(sizes), subject.call(sizes[:1]))
    ours, eager = tensors(subject.run(call)), tensors(subject.eager(call))
    if any(not torch.equal(a.isnan(), b.isnan()) for a, b in zip(ours, eager, strict=True)):
        outcome.problems.append("NaN in one item reaches others")


def with_nan(call: Call, first: Call) -> Call:
    """NaN in the part of a call that its first item, alone in `first`, makes up."""
    return {name: _poisoned(value, first[name]) for name, value in call.items()}


def _poisoned(value: Any, first: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    value = value.clone()
    sides = zip(value.shape, first.shape, strict=True)
    dim = next((d for d, (a, b) in enumerate(sides) if a != b), None)
    if dim is not None:
        value.narrow(dim, 0, first.shape[dim]).fill_(float("nan"))
    return value


def _state(subject: Subject) -> list[Any]:
    """What attaching may change: attributes and attention functions of modules, the weights."""
    modules = list(subject.model.modules())
    configs = [getattr(module, "config", None) for module in modules]
    return [
        [{name: id(value) for name, value in vars(module).items()} for module in modules],
        [getattr(config, "_attn_implementation", None) for config in configs],
        [(n, t.shape, t.dtype) for n, t in subject.model.state_dict().items()],
    ]


def _breaks(handle: Handle) -> int:
    managers = [m.manager for m in handle._methods if m.manager is not None]
    exact = [e for m in managers if m._exact is not None for e in m._exact.entries.values()]
    graphs = [entry.graph for entry in exact]
    return max((g.num_breaks for g in graphs if isinstance(g, BreakableGraph)), default=0)


def _why(warnings: list[str], stats: EncoderStats) -> str:
    """Why the first graph that was tried isn't there, as mmgraph says it."""
    reasons = [text.partition(" runs in eager mode for ")[2] for text in warnings]
    texts = [reason.partition(": ")[2] for reason in reasons if reason]
    text = texts[0] if texts else ", ".join(reason.value for reason in stats.misses)
    return " ".join(text.split())[:200]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Texts of what mmgraph warns of within the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mmgraph")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
