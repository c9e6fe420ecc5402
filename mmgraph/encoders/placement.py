"""Whether an encoder's parameters are where a graph could use them."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["main_device", "main_dtype", "placement_problem"]


def main_device(module: nn.Module) -> torch.device:
    """Device of the first parameter; the CPU if there is none."""
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def main_dtype(module: nn.Module) -> torch.dtype:
    """Dtype of the first floating-point parameter."""
    floating = (p.dtype for p in module.parameters() if p.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


def placement_problem(module: nn.Module) -> str | None:
    """Say why no graph can use the parameters of `module`, or ``None`` if one can."""
    hooked = [name for name, m in module.named_modules() if _moves_weights(m)]
    if hooked:
        return f"accelerate moves the weights of {hooked[0] or 'the encoder'!r} in at each forward"
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return "the encoder has parameters on the meta device"
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        return "the encoder is split over " + ", ".join(sorted(map(str, devices)))
    return None


def _moves_weights(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(h, "offload", False) for h in hooks if h is not None)
