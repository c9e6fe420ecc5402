"""Whether an encoder's parameters are where a graph could use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

__all__ = ["first_parameter", "main_dtype", "placement_problem"]


_ABSENT = torch.empty(0)


def first_parameter(module: nn.Module) -> Callable[[], torch.Tensor]:
    """Return a function that gives the first parameter as it is now, without a walk of modules.

    A module without parameters gives an empty tensor on the CPU.
    """
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                return partial(_parameter_of, owner, name)
    return lambda: _ABSENT


def _parameter_of(owner: nn.Module, name: str) -> torch.Tensor:
    parameter = owner._parameters[name]
    return _ABSENT if parameter is None else parameter


def main_dtype(module: nn.Module) -> torch.dtype:
    """Dtype of the first floating-point parameter."""
    floating = (p.dtype for p in module.parameters() if p.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


def placement_problem(module: nn.Module) -> str | None:
    """Say why no graph can use the parameters of `module`, or ``None`` if one can.

    accelerate's CPU offload is refused: its hooks make new tensors for the weights at each forward,
    where a graph holds addresses, and ``GraphBackend.before_capture_ends`` doesn't change that. An
    engine's own offloader, which copies into weights that stay in place, is none of this function's
    business; it joins its copy streams in that hook.
    """
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
