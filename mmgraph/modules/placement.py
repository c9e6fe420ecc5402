"""Whether an encoder's parameters are where a graph could use them, and a copy in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from mmgraph.modules.attention import attention_configs

__all__ = ["first_parameter", "main_dtype", "placement_problem", "widened"]


_ABSENT = torch.empty(0)
_WIDENED = (torch.float16, torch.bfloat16, torch.float32)


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


def widened(module: nn.Module) -> nn.Module:
    """Return a copy of `module` in float32, with the methods that it has while it isn't attached.

    It attends by PyTorch's own function where `module` does by one for half precision only.

    Raises:
        TypeError: Weights aren't plain numbers (quantised, sharded), so nothing is known of a copy.
    """
    if any(type(p) is not nn.Parameter or p.dtype not in _WIDENED for p in module.parameters()):
        raise TypeError("weights that aren't plain floating-point numbers can't be widened")
    twin = copy.deepcopy(module).float()
    for config in attention_configs(twin):
        if "flash" in str(config._attn_implementation_internal):
            config._attn_implementation_internal = "sdpa"
    return twin


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
