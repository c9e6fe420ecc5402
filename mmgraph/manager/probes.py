"""The calls that fresh graphs are checked with, and what eager mode answers to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmgraph.graphs import GraphBackend
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey

__all__ = ["Probe", "Probes"]

_REMEMBERED = 4


class Probe:
    """A call with eager mode's answer, which is had once.

    Attributes:
        call: Its arguments.
        seconds: What eager mode took for it, once, where that is timed.
    """

    def __init__(
        self,
        call: Mapping[str, Any],
        model: SupportsEncoderCudaGraph,
        backend: GraphBackend,
    ) -> None:
        self.call = call
        self.seconds: float | None = None
        self._model = model
        self._backend = backend
        self._answer: Any = None

    def answer(self) -> Any:
        """What ``embed_multimodal`` returns."""
        if self._answer is None:
            self._answer = self._timed() if self._backend.is_timed else self._run()
        return self._answer

    def _timed(self) -> Any:
        self._backend.synchronize()
        start = time.perf_counter()
        answer = self._run()
        self._backend.synchronize()
        self.seconds = time.perf_counter() - start
        return answer

    def _run(self) -> Any:
        return self._model.embed_multimodal(**self.call)


class Probes:
    """The probes of an encoder by key; in a capture those of its graphs are often the same calls.

    In a bulk capture eager mode takes longer than all else, so it answers no call twice.
    """

    def __init__(
        self, model: SupportsEncoderCudaGraph, facts: EncoderFacts, backend: GraphBackend
    ) -> None:
        self._model = model
        self._facts = facts
        self._backend = backend
        self._remembered: list[Probe] = []
        self._depth = 0

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Within the block the last few probes and their answers are kept; then nothing is."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self._remembered.clear()

    def of(self, key: GraphKey) -> Sequence[Probe]:
        """The calls that a graph of `key` is checked with; none for an encoder that names none."""
        if self._facts.probes is None:
            return ()
        return [self._probe(call) for call in self._facts.probes(key)]

    def _probe(self, call: Mapping[str, Any]) -> Probe:
        for probe in self._remembered:
            if _equal(probe.call, call):
                return probe
        probe = Probe(call, self._model, self._backend)
        if self._depth:
            self._remembered[:] = [*self._remembered[1 - _REMEMBERED :], probe]
        return probe


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _equal_tensors(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    same = a == b
    return same if isinstance(same, bool) else False  # an array, say: answered once more


def _equal_tensors(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(a, b)
