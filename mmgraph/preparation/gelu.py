"""The exact GELU in fewer instructions, in compiled blocks and for 16-bit numbers.

No matrix product applies the exact GELU (erf) on its way out, so it is a kernel of its own. The
compiler takes CUDA's erf for it: some 34 instructions an element on an H200, which then computes
for longer than it reads and writes. Here it takes some 17, and the numbers are those of PyTorch up
to a hair of the last of their 16 bits; more often they are nearer to the exact ones, as nothing
cancels where x is negative.

With Phi the normal distribution, GELU is x * Phi(x), and Phi(x) = 1 / (1 + 2 ** (x * P(x * x))) for
an even function P, the log-odds over -x. It is smooth, and a polynomial of degree 8 gives Phi(x) to
4e-6 of its value down to x = -4.2, where float16 runs out of normal numbers, and GELU to 2e-10
below. 1 / y is the square of 1 / sqrt(y): a division takes steps for the largest and smallest
numbers that the root needn't.

Only modules are found. A block that calls ``F.gelu`` itself keeps what the compiler makes of it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["ExactGelus", "gelu"]

_HALF = (torch.float16, torch.bfloat16)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the exact GELU of 16-bit numbers, in steps that the compiler fuses into one kernel."""
    y = x.float()
    square = y * y
    # Least largest error for squares up to 36. The first is negative: far out Phi ends at 0 and 1.
    # Literals: the compiler takes numbers from elsewhere for inputs, which the kernel would load.
    log_odds = square * -1.77515457e-12 + 2.68909367e-10
    log_odds = log_odds * square - 1.75332033e-08
    log_odds = log_odds * square + 6.42290331e-07
    log_odds = log_odds * square - 1.42217814e-05
    log_odds = log_odds * square + 1.75142006e-04
    log_odds = log_odds * square + 5.03664269e-05
    log_odds = log_odds * square - 1.04781665e-01
    log_odds = log_odds * square - 2.30222869e00
    root = torch.rsqrt(torch.exp2(y * log_odds) + 1)
    return (y * root * root).to(x.dtype)


class ExactGelus:
    """The exact GELUs of a tower's blocks.

    Args:
        blocks: Those that will be compiled. They are as they were except within :meth:`applied`.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self._classes = {
            m: type(m)
            for m in modules
            if _is_alone(m) and _is_exact_gelu(m) and _has_shorter(type(m))
        }

    def __len__(self) -> int:
        return len(self._classes)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block they take fewer instructions where they are compiled."""
        classes: dict[nn.Module, Any] = {
            m: c for m, c in self._classes.items() if type(m) is c and _is_alone(m)
        }
        try:
            for module, own in classes.items():
                module.__class__ = _shorter(own)
            yield
        finally:
            for module, own in classes.items():
                module.__class__ = own


@cache  # compiled code asks for the class: another one would have it compiled again
def _shorter(own: type[nn.Module]) -> Any:
    """The class of an exact GELU that takes fewer instructions where it is compiled."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_half = len(args) == 1 and not kwargs and args[0].dtype in _HALF
        if is_half and torch.compiler.is_compiling():
            return gelu(args[0])
        return own.forward(self, *args, **kwargs)

    def reduced(self: nn.Module, _: Any) -> Any:
        """A copy that is made meanwhile, in another thread, is one of the own class."""
        # As in pickles of old: the newer way insists on the class that the object has now.
        return (copyreg._reconstructor, (own, object, None), self.__dict__)  # type: ignore[attr-defined]

    names = {"forward": forward, "__reduce_ex__": reduced}
    return type(f"Shorter{own.__name__}", (own,), names)


def _has_shorter(own: Any) -> bool:
    """Whether a class can be derived from: some want to be told more, or allow none."""
    try:
        _shorter(own)
    except Exception:
        return False
    return True


def _is_alone(module: nn.Module) -> bool:
    """Whether a module is all that runs when it is called, and nobody trains it."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    is_hooked = before or after or module._backward_pre_hooks or module._backward_hooks
    return not (is_hooked or module.training or "forward" in module.__dict__)


def _is_exact_gelu(module: nn.Module) -> bool:
    """Whether a module is the exact GELU, by what it does to numbers, and gives what it gets."""
    if "gelu" not in type(module).__name__.lower():
        return False
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return False
    # Some are clipped, at 10.
    x = torch.cat([torch.linspace(-12, 12, 193), torch.tensor([-1e4, 1e4])]).double()
    tolerances = {torch.float64: 1e-9, torch.float16: 0.05, torch.bfloat16: 0.05}
    try:
        return all(
            _is_near(module.forward(x.to(dtype)), F.gelu(x).to(dtype), tolerance)
            for dtype, tolerance in tolerances.items()
        )
    except Exception:  # it takes something else
        return False


def _is_near(output: Any, expected: torch.Tensor, tolerance: float) -> bool:
    return (
        isinstance(output, torch.Tensor)
        and output.dtype == expected.dtype
        and torch.allclose(output, expected, rtol=0, atol=tolerance)
    )
