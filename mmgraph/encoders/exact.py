"""Taking a call of a tower apart for a graph of its own.

Tensors of whole numbers that aren't too large (grids, sizes, masks, positions) say what the call
*is*: a tower may read them on the host, so their values belong to the key. Everything else is
contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from mmgraph.encoders.calls import TowerSignature, freeze
from mmgraph.types import ExactCall, Reason, Refusal

__all__ = ["exact_call"]

_MOST_OF_MAIN = 1 << 16
"""Values up to which a main input of whole numbers says what a call is: pixels are contents."""


def exact_call(
    mm_kwargs: Mapping[str, Any],
    signature: TowerSignature,
    device: torch.device,
    flags: Hashable,
    num_tokens: int,
) -> ExactCall:
    """Return the parts of a call; reads small tensors of whole numbers on the host.

    Raises:
        Refusal: An argument is neither a tensor nor a plain constant, contents are elsewhere or
            want gradients, or the main input is none.
    """
    if not isinstance(mm_kwargs.get(signature.main_input), torch.Tensor):
        raise Refusal(Reason.UNSUPPORTED_CALL, detail=f"no {signature.main_input}")
    parts: list[Hashable] = [flags]
    contents: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in sorted(mm_kwargs.items()):
        if not isinstance(value, torch.Tensor):
            if not signature.is_default(name, value):
                parts.append((name, freeze(value)))
            others[name] = value
        elif value.dtype.is_floating_point or value.numel() > (
            _MOST_OF_MAIN if name == signature.main_input else _most_values(value.device)
        ):
            if value.device != device:
                raise Refusal(Reason.DEVICE)
            if value.requires_grad and torch.is_grad_enabled():
                raise Refusal(Reason.GRAD)
            parts.append((name, value.shape, value.dtype))
            contents[name] = value
        else:
            values = value.detach().contiguous().cpu().numpy().tobytes()
            digest = hashlib.blake2b(values, digest_size=32).digest()  # keys are kept for long
            parts.append((name, value.shape, value.dtype, value.device, digest))
            others[name] = value
    if not contents:
        raise Refusal(Reason.UNSUPPORTED_CALL, detail="no contents that a graph could read")
    return ExactCall(tuple(parts), contents, others, num_tokens)


def _most_values(device: torch.device) -> int:
    """Values up to which a tensor says what a call is; larger ones are contents.

    The mask of 64 clips of 30 s has 192,000. On the host to read it is all that it takes, and
    contents that are there are nothing that a graph could read.
    """
    return 1 << 20 if device.type == "cpu" else 1 << 18
