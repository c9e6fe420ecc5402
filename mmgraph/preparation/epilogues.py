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
from torch.utils._pytree import tree_map_only

from mmgraph.graphs.backend import ran_out_of_memory
from mmgraph.log import get_logger
from mmgraph.ops import can_add, checked, milliseconds
from mmgraph.preparation.rewriting import move_into_products

__all__ = ["EpilogueChoice", "Epilogues", "compiled_with_epilogues"]

_logger = get_logger(__name__)
_FEWEST_ROWS = 2048
_WORTH = 0.97
"""Less is within what timings differ by, and sums are rounded more often in products."""
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
        return self.fused_ms < _WORTH * self.apart_ms


def compiled_with_epilogues(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a block with additions and gates in its products."""
    compiled: Callable[..., Any] = torch.compile(function, backend=_backend, dynamic=True)
    return compiled


class Epilogues:
    """Which sizes of a tower's blocks have additions and gates in their products.

    Attributes:
        choices: What was measured, by kind of block and size.
        given_up: Why there are none in a kind of block.
    """

    def __init__(self) -> None:
        self.choices: dict[Hashable, EpilogueChoice] = {}
        self.given_up: dict[Hashable, str] = {}
        self._without: set[Hashable] = set()
        """Kinds of block that have none."""
        self._lock = threading.RLock()

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
        x = _first_in_half((*args, *kwargs.values()))
        if x is None or kind in self._without or kind in self.given_up:
            return False
        rows = x.numel() // max(1, x.shape[-1])
        if rows < _FEWEST_ROWS or not can_add(x.device):
            return False
        size = (kind, _shape(args), _shape(kwargs))
        with self._lock:
            choice = self.choices.get(size)
            if choice is None:
                if torch.cuda.is_current_stream_capturing():
                    return False
                with torch.cuda.device(x.device):
                    choice = self._measured(kind, rows, apart, fused, args, kwargs)
                if choice is None:
                    return False
                self.choices[size] = choice
            return choice.is_fused

    def describe(self) -> list[str]:
        """What was measured, a line each."""
        lines = [
            f"a block of {c.rows} rows, additions and gates in its products: "
            f"{'yes' if c.is_fused else 'no'} (us: apart {1e3 * c.apart_ms:.0f}, "
            f"in products {1e3 * c.fused_ms:.0f})"
            for c in sorted(self.choices.values(), key=lambda choice: choice.rows)
        ]
        reasons = dict.fromkeys(self.given_up.values())
        return lines + [f"additions and gates not in their products: {why}" for why in reasons]

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
        args, kwargs = _copied(tuple(args), dict(kwargs))
        apart(*args, **kwargs)
        try:
            with checked() as products:
                fused(*args, **kwargs)
            if not products:
                self._without.add(kind)
                return None
            return EpilogueChoice(
                rows,
                milliseconds(lambda: apart(*args, **kwargs)),
                milliseconds(lambda: fused(*args, **kwargs)),
            )
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self.given_up[kind] = why
            _logger.warning("additions and gates have kernels of their own: %s", why)
            return None


def _backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """One for all towers: Dynamo keeps compiled code by it."""
    from torch._inductor.compile_fx import compile_fx

    move_into_products(graph)
    return compile_fx(graph, inputs)


def _first_in_half(values: Sequence[Any]) -> torch.Tensor | None:
    """What a block works on: the first tensor in half precision."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return next((t for t in tensors if t.dtype in _HALF and t.dim()), None)


def _shape(value: Any) -> Hashable:
    """What of an argument the time of a block may hang on."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, Mapping):
        return tuple((name, _shape(v)) for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    known: Any = value if isinstance(value, (int, float, str)) else type(value)
    return known


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments in memory of their own, laid out as they were: code is made for that, too."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        own = storages.get(storage.data_ptr())
        if own is None:
            own = storages[storage.data_ptr()] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())

    copies: tuple[Any, Any] = tree_map_only(torch.Tensor, copied, (args, kwargs))
    return copies
