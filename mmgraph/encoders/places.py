"""Whether a tower takes numbers in its contents for places.

Some patches come with their row and column in front, as numbers of the patches' own type
(``Pix2StructVisionModel``, ``Kosmos2_5VisionModel`` of transformers). Made-up contents would send
such a tower out of the bounds of its tables: an IndexError on a CPU, on a GPU the process is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["casts_to_integers"]


@torch.no_grad()
def casts_to_integers(run: Callable[[], object]) -> bool:
    """Whether `run` turns floating-point numbers into integers, as it does before looking them up.

    Contents of `run` should be in [0, 1): they all become 0 then, which every table has. If it
    raises, what it did until then counts: the capture that follows runs into the same error, and
    says so.
    """
    mode = _Casts()
    with suppress(Exception), mode:
        run()
    return mode.seen


class _Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_integer(result.dtype):
            self.seen |= args[0].is_floating_point()
        return result


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
