"""Comparing generated ids.

In half precision a different kernel rounds differently, and the language models here have random
weights, whose best two tokens are often closer than that rounding. So where the ids part, the
model in float32 decides. It is a tie if float32 sets the two tokens apart by less than what eager
mode itself loses on a logit, and if the graph's logits are about as close to float32 as eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmgraph.encoders import eager_towers

__all__ = ["Generated", "compare_ids", "generate", "relative_error", "widened"]

_NEW_TOKENS = 8
_MAX_ERROR_RATIO = 1.5  # of one step: its error lies in few directions, so the ratio scatters


@dataclass(frozen=True, slots=True)
class Generated:
    """Greedy tokens (N,) that a model generated and the logits (N, V) that it chose them by."""

    ids: torch.Tensor
    logits: torch.Tensor


def generate(model: Any, prompt: dict[str, torch.Tensor]) -> Generated:
    """Generate greedily, always the same number of tokens."""
    output = model.generate(
        **prompt,
        max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(list(output.logits)).float()
    return Generated(output.sequences[0, -len(logits) :], logits)


def compare_ids(
    model: Any, prompt: dict[str, torch.Tensor], eager: Generated, graph: Generated
) -> str:
    """Return "yes", "tie" or "NO"."""
    different = (eager.ids != graph.ids).nonzero()
    if not len(different):
        return "yes"
    step = int(different[0])
    truth = _float32_logits(model, prompt, eager.ids[:step])
    apart = (truth[eager.ids[step]] - truth[graph.ids[step]]).abs()
    close = apart <= (eager.logits[step] - truth).abs().max()
    ours, theirs = (relative_error(g.logits[step], truth) for g in (graph, eager))
    return "tie" if close and ours <= _MAX_ERROR_RATIO * theirs else "NO"


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Error of `a` against `b` in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let a half-precision model compute in float32 for a while.

    Its own storage is set aside and put back, not converted: graphs hold those addresses.
    """
    parts = (*model.parameters(), *model.buffers())
    narrow = [(p, p.data) for p in parts if p.dtype in (torch.bfloat16, torch.float16)]
    for part, data in narrow:
        part.data = data.float()
    try:
        yield
    finally:
        for part, data in narrow:
            part.data = data


def _float32_logits(
    model: Any, prompt: dict[str, torch.Tensor], generated: torch.Tensor
) -> torch.Tensor:
    """Logits (V,) of the token after `generated`, from the model in float32 and eager mode."""
    longer = dict(prompt)
    fills: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "input_ids": lambda ids: ids,
        "attention_mask": torch.ones_like,
        "mm_token_type_ids": torch.zeros_like,
    }
    for name in fills.keys() & prompt.keys():
        longer[name] = torch.cat([prompt[name], fills[name](generated[None])], dim=1)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in longer.items()}
    with widened(model), eager_towers():
        logits: torch.Tensor = model(**wide).logits[0, -1].float()
    return logits
