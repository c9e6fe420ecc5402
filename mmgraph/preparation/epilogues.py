"""Additions and gates at the end of the matrix products before them, in compiled blocks.

A block adds what its attention and its MLP make to what it got, and a gated MLP multiplies two
halves of a product. Each is a kernel that waits for memory, or a part of one. With quack installed
the product itself does it (``ops/epilogues.py``), and what is added isn't rounded in between.

Its products aren't always as fast as cuBLAS: for few rows they are slower by more than is saved. So
a block is compiled twice, and each of its sizes takes the way that is measured to be faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from mmgraph.log import get_logger
from mmgraph.ops import WrongProductError, can_add, checked, milliseconds
from mmgraph.preparation.rewriting import move_into_products

__all__ = ["EpilogueChoice", "Epilogues"]

_logger = get_logger(__name__)
_FEWEST_ROWS = 2048
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class EpilogueChoice:
    """What was measured for a block of one size.

    Attributes:
        rows: Of what the block gets.
        apart_ms: Milliseconds with kernels of their own for additions and gates.
        fused_ms: Milliseconds with them in the products.
    """

    rows: int
    apart_ms: float
    fused_ms: float

    @property
    def is_fused(self) -> bool:
        """Whether they are in the products."""
        return self.fused_ms < self.apart_ms


class Epilogues:
    """Which sizes of a tower's blocks have additions and gates in their products.

    Attributes:
        choices: What was measured, by block and size.
        why_not: Why there are none; ``None`` if there may be.
    """

    def __init__(self) -> None:
        self.choices: dict[Hashable, EpilogueChoice] = {}
        self.why_not: str | None = None
        self._moved = 0
        self._kinds: dict[Hashable, bool] = {}
        """Of blocks: whether they have any."""
        self._backend = self._compiled  # one object: Dynamo knows code by it
        self._lock = threading.RLock()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a block with additions and gates in its products."""
        compiled: Callable[..., Any] = torch.compile(function, backend=self._backend, dynamic=True)
        return compiled

    def is_faster(
        self,
        kind: Hashable,
        apart: Callable[..., Any],
        fused: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Whether `fused` is to be called; measured when a size comes for the first time.

        Args:
            kind: What blocks that share their times have in common besides the sizes.
            apart: The block without.
            fused: The block with.
            args: Of the call. They aren't written to.
            kwargs: Likewise.
        """
        rows = _rows(args)
        if (
            self.why_not is not None
            or not self._kinds.get(kind, True)
            or rows < _FEWEST_ROWS
            or not can_add(args[0].device)
        ):
            return False
        size = (kind, tuple(_shape(value) for value in (*args, *kwargs.values())))
        with self._lock:
            choice = self.choices.get(size)
            if choice is None:
                if torch.cuda.is_current_stream_capturing():
                    return False
                choice = self._measured(kind, rows, apart, fused, args, kwargs)
                if choice is None:
                    return False
                self.choices[size] = choice
            return choice.is_fused

    def describe(self) -> list[str]:
        """What was measured, a line each."""
        if self.why_not is not None:
            return [f"additions and gates not in their products: {self.why_not}"]
        return [
            f"a block of {c.rows} rows, additions and gates in its products: "
            f"{'yes' if c.is_fused else 'no'} (us: apart {1e3 * c.apart_ms:.0f}, "
            f"in products {1e3 * c.fused_ms:.0f})"
            for c in sorted(self.choices.values(), key=lambda choice: choice.rows)
        ]

    def _measured(
        self,
        kind: Hashable,
        rows: int,
        apart: Callable[..., Any],
        fused: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> EpilogueChoice | None:
        """Time both ways on copies of the arguments; ``None`` if they are one, or one is wrong."""
        args, kwargs = tree_map(_copied, (tuple(args), dict(kwargs)))
        apart(*args, **kwargs)
        before = self._moved
        try:
            with checked():
                fused(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except WrongProductError as error:
            self._give_up(str(error))
            return None
        except Exception as error:
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._give_up(f"it failed ({why})")
            return None
        if not self._kinds.setdefault(kind, self._moved > before):
            return None
        with torch.cuda.device(args[0].device):
            return EpilogueChoice(
                rows,
                milliseconds(lambda: apart(*args, **kwargs)),
                milliseconds(lambda: fused(*args, **kwargs)),
            )

    def _give_up(self, why: str) -> None:
        self.why_not = why
        _logger.warning("additions and gates have kernels of their own: %s", why)

    def _compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self._moved += move_into_products(graph)
        return compile_fx(graph, inputs)


def _rows(args: Sequence[Any]) -> int:
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or first.dtype not in _HALF or not first.dim():
        return 0
    return first.numel() // max(1, first.shape[-1])


def _shape(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    known: Any = value if isinstance(value, (int, float, str)) else type(value)
    return known


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
