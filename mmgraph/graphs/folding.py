"""Constant folding for captures: what doesn't depend on contents is computed once, beforehand.

A forward that reads image sizes, counts the patches of a mask or uploads a table can't be captured
as it stands. But a graph that serves one call only, up to the contents of its large tensors, may
take all that for granted: it is the same each time. So the forward runs twice:

1. Observed: operations on nothing but the call's constants (and on what came of them) are kept
   with their results. Everything else, weights included, is content. A read of content on the
   host is an error that names the module which does it.
2. Folded, under the recorder: those operations return what they returned before, so that reads on
   the host and uploads never reach the device; only the rest is recorded.

What a reader would get wrong: an operation on constants is *not* folded where its memory is later
written with content, or written again after content has been computed from it. A replay would
find the last state there instead of the state of that moment; such memory is made in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs.backend import Runnable
from mmgraph.graphs.folding_modes import Fold, FoldFunctions, Observer
from mmgraph.graphs.operations import Step
from mmgraph.graphs.recorders import ModesRecorder
from mmgraph.graphs.segments import SegmentRecorder
from mmgraph.graphs.trees import storage_of, tensors_in

__all__ = ["Folding"]


class Folding:
    """The two runs of one call.

    Args:
        constants: Tensors whose contents are the same whenever the graph is replayed.
    """

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        self.constant = {storage_of(t): t for t in constants}
        self._given = dict(self.constant)
        self.steps: list[Step] = []
        self.in_graph: set[int] = set()
        """Memory of constants that has to be made in the graph."""
        self.read: set[int] = set()
        """Memory of constants that content has been computed from."""
        self.position = 0
        self.used: dict[int, torch.Tensor] = {}
        """Constants that the graph reads; they must live as long as it does."""
        self.is_observing = False
        """Whether the first run is going on."""
        self.num_breaks = 0
        self._recorder: ModesRecorder | None = None
        self._kept: set[int] = set()
        self._visible: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def observer(self) -> SegmentRecorder:
        """Recorder of the first run."""
        return Observer(self)

    def recorder(self, inner: SegmentRecorder) -> SegmentRecorder:
        """Recorder of the second run, on top of a backend's."""
        self.position = 0
        results = tensors_in([s.out for s in self.steps if s.constant])
        positions = tensors_in([(s.indices, s.values) for s in self.steps])
        self._kept = {storage_of(t) for t in (*results, *positions)} | self._given.keys()
        self._recorder = ModesRecorder(inner, Fold(self), FoldFunctions(self))
        return self._recorder

    @contextmanager
    def hidden(self, start: int, end: int, constants: Iterable[torch.Tensor]) -> Iterator[None]:
        """Within the block the second run does the steps from `start` to `end` as it likes.

        Args:
            start: Of the steps; the run must have come there.
            end: The step that follows.
            constants: What the steps read of constants.

        Raises:
            CaptureError: The run has come to another step.
        """
        if self._recorder is None:  # a run before it is recorded
            yield
            return
        with self._recorder.paused() as was_recording:
            if was_recording and self.position != start:
                raise CaptureError("two runs of the same call differ: a block begins elsewhere")
            if was_recording:
                self.keep(constants)
            yield
            if was_recording:
                self.position = end

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note those of `tensors` that were given or come from the first run."""
        self.used.update({id(t): t for t in tensors if storage_of(t) in self._kept})

    def keeping_outputs(self, run: Runnable) -> Runnable:
        """`run`, with its outputs noted as well: some may be constants."""

        def noting(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            outputs = run(buffers)
            self.keep(outputs)
            return outputs

        return noting

    def is_constant(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of `tensors` have the same contents in each replay."""
        return all(storage_of(t) in self.constant for t in tensors)

    def write(self, storages: Iterable[int], *, content: bool) -> None:
        """Note that memory was written, with `content` or with what is always the same.

        Raises:
            CaptureError: It is that of a given tensor, which no replay makes anew.
        """
        for storage in storages:
            if storage in self._given:
                raise CaptureError("it writes to an argument that it may read on the host")
            if (content and self.constant.pop(storage, None) is not None) or storage in self.read:
                self.in_graph.add(storage)

    def have_read(self, storages: Iterable[int]) -> None:
        """Note that something which runs in the graph reads memory, if that holds constants."""
        self.read |= set(storages) & self.constant.keys()

    def show(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what the forward gets to see: what factories made in the dispatcher is copied."""
        for tensor in tensors:
            self._visible.setdefault(storage_of(tensor), tensor)

    def break_begins(self) -> None:
        """What follows isn't observed: it may read each constant, and write to some."""
        self.num_breaks += 1
        self.read |= self.constant.keys()
        self._versions = {storage: self._version(storage) for storage in self.constant}

    def break_ended(self) -> None:
        """Find out which constants were written to."""
        before, self._versions = self._versions, {}
        written = [s for s, version in before.items() if self._version(s) != version]
        self.write(written, content=True)

    def _version(self, storage: int) -> int:
        """How often a constant was written to, as far as torch counts that."""
        tensor = self._visible.get(storage, self.constant[storage])
        return 0 if tensor.is_inference() else tensor._version

    def end(self) -> None:
        """Check that the second run was as long as the first.

        Raises:
            CaptureError: It ended early.
        """
        if self.position < len(self.steps):
            func = self.steps[self.position].func
            raise CaptureError(f"two runs of the same call differ: {func} has become the end")

    def next_step(self, func: Any) -> Step:
        """The step of the observed run that `func` must be.

        Raises:
            CaptureError: The second run went another way.
        """
        step = self.steps[self.position] if self.position < len(self.steps) else None
        self.position += 1
        if step is None or step.func is not func:
            expected = "the end" if step is None else step.func
            raise CaptureError(f"two runs of the same call differ: {expected} has become {func}")
        return step
