"""What makes a tower's graphs fast, done to it once and put in force while they are recorded.

Each step computes the same numbers up to rounding, from the user's own parameters, and can be
switched off. Only captures see it: a call in eager mode runs the library's own code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn

from mmgraph.errors import CaptureError
from mmgraph.log import get_logger
from mmgraph.ops import AttentionChoice, AttentionShape
from mmgraph.preparation.activation import FusedActivations
from mmgraph.preparation.align import AlignedWeights
from mmgraph.preparation.blocks import compiled_blocks, find_blocks
from mmgraph.preparation.epilogues import Epilogues
from mmgraph.preparation.gelu import ExactGelus
from mmgraph.preparation.patch_embed import linear_patch_embeddings
from mmgraph.preparation.turns import Turns

__all__ = ["Preparation"]

_logger = get_logger(__name__)
_Output = TypeVar("_Output")


class Preparation:
    """The steps for one tower; all its methods share them.

    Args:
        module: The tower. Weights that are to be aligned move at once.
        name: Of the tower, for messages.
        align_weights: Whether weights with odd widths are padded.
        merge_weights: Whether layers that read the same input become one product.
        fuse_activations: Whether linear layers apply the activation after them; in compiled
            blocks also whether the exact GELU, which none can apply, takes fewer instructions.
        fuse_epilogues: Whether products of compiled blocks end with the additions and gates after
            them where that is faster.
        compile_blocks: Whether repeated blocks are compiled.
        choose_attention: Whether the kernel of attention over segments is chosen by measurement.
        turns: Shared with towers that have modules or a config in common with this one.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        align_weights: bool = False,
        merge_weights: bool = False,
        fuse_activations: bool = False,
        fuse_epilogues: bool = False,
        compile_blocks: bool = False,
        choose_attention: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.turns = turns or Turns()
        """Whose turn it is to run the tower: eager calls, or captures that alter it."""
        self._module = module
        self._name = name
        self._no_room = False
        try:
            self._weights = AlignedWeights(module, pad=align_weights, merge=merge_weights)
        except torch.OutOfMemoryError as error:
            _logger.warning("%s: weights stay where they are: %s", name, error)
            self._no_room = True
            self._weights = AlignedWeights(module, pad=False)
        self._activations = (
            FusedActivations(module, self._weights.layers) if fuse_activations else None
        )
        blocks = find_blocks(module) if compile_blocks else []
        self._num_blocks = len(blocks)
        self._epilogues = Epilogues() if fuse_epilogues else None
        self._gelus = ExactGelus(blocks if fuse_activations else [])
        self.no_compile: str | None = None if compile_blocks else "switched off"
        """Why blocks aren't compiled; ``None`` if they are."""
        if compile_blocks and not self._num_blocks:
            self.no_compile = "the tower has no repeated blocks"
        self.attention: dict[AttentionShape, AttentionChoice] | None = (
            {} if choose_attention else None
        )
        """The kernels that were chosen; ``None`` if none are to be."""
        self._compiled = False
        self._without_compile: set[int] = set()
        """Threads that capture without it."""
        self.on_trial = self.no_compile is None
        """Whether it is still to be shown that compiled blocks are right and faster."""

    def run(self, forward: Callable[[], _Output]) -> _Output:
        """Call the tower with all steps in force; a compile that fails is given up for good."""
        left_out = threading.get_ident() in self._without_compile
        if self.no_compile is not None or left_out:
            with self._applied(compiled=False):
                return forward()
        try:
            with self._applied(compiled=True):
                output = forward()
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if (self._compiled and not _comes_from_compiler(error)) or _is_recording():
                raise
            with self._applied(compiled=False):
                output = forward()  # fails as well, if it is the call
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self.decide(f"the compiler failed ({why})", failed=True)
            return output
        self._compiled = True
        return output

    @contextmanager
    def without_compile(self) -> Iterator[None]:
        """Within the block captures take the blocks as they are."""
        self._without_compile.add(threading.get_ident())
        try:
            yield
        finally:
            self._without_compile.discard(threading.get_ident())

    def decide(self, why_not: str | None, *, failed: bool = False) -> None:
        """End the trial: compile blocks or don't, and why; that is a warning if it `failed`."""
        self.on_trial = False
        if why_not is not None and self.no_compile is None:
            self.no_compile = why_not
            level = logging.WARNING if failed else logging.INFO
            _logger.log(level, "%s: blocks are captured as they are: %s", self._name, why_not)

    def describe(self) -> list[str]:
        """What is done to the tower, a line each."""
        lines = []
        if self._no_room:
            lines.append("weights stay where they are: no memory to move them")
        if self._weights.widths:
            widths = ", ".join(f"{n} to {m}" for n, m in self._weights.widths.items())
            lines.append(f"{len(self._weights)} linear layers on padded weights ({widths})")
        if self._weights.num_merged:
            lines.append(f"{self._weights.num_merged} linear layers merged with their neighbours")
        if self._activations:
            lines.append(f"{len(self._activations)} linear layers with their activation")
        if self.no_compile is None:
            lines.append(f"{self._num_blocks} blocks compiled")
            if self._gelus:
                lines.append(f"{len(self._gelus)} exact GELUs in fewer instructions")
            if self._epilogues is not None:
                lines += self._epilogues.describe()
        elif self._num_blocks:
            lines.append(f"blocks not compiled: {self.no_compile}")
        return lines + _describe_attention(self.attention or {})

    def undo(self) -> None:
        """Give the tower its own parameters back, after its graphs are gone."""
        self._weights.undo()

    @contextmanager
    def _applied(self, *, compiled: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.turns.alone())
            stack.enter_context(linear_patch_embeddings(self._module))
            stack.enter_context(self._weights.applied())
            if self._activations is not None:
                stack.enter_context(self._activations.applied())
            if compiled:
                stack.enter_context(self._gelus.applied())
                stack.enter_context(compiled_blocks(self._module, self._epilogues))
            yield


def _describe_attention(choices: Mapping[AttentionShape, AttentionChoice]) -> list[str]:
    lines = []
    for shape, choice in sorted(choices.items(), key=lambda pair: pair[0][:3]):
        if choice.milliseconds:
            times = ", ".join(f"{name} {1e3 * ms:.0f}" for name, ms in choice.milliseconds.items())
            lines.append(
                f"attention over {shape.tokens} tokens in segments of {shape.longest}: "
                f"{choice.kernel} (us: {times})"
            )
    return lines


def _comes_from_compiler(error: Exception) -> bool:
    """Whether a size that is new to the compiler made it give up; its errors share no class."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
