"""The calls that fresh graphs are checked with, and what eager mode answers to them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mmgraph.graphs import GraphBackend
from mmgraph.graphs.trees import fields_of, reordered
from mmgraph.manager.judge import Flat
from mmgraph.manager.outputs import OutputLayout
from mmgraph.manager.verify import largest_error, max_error
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey, ProbeCall

__all__ = ["Probe", "Probes"]

_REMEMBERED = 4
_NAMED = 16


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

    def tensors(self, flat: Flat, _: OutputLayout) -> Sequence[torch.Tensor]:
        """Eager mode's answer as a graph of that layout gives it."""
        return flat(self.answer())

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


class _Kept(Probe):
    """One whose answer outlives others: an encoder may give each in the same memory."""

    def _run(self) -> Any:
        own: dict[int, torch.Tensor] = {}

        def cloned(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in own:  # what is given twice is one tensor
                own[id(tensor)] = tensor.clone()
            return own[id(tensor)]

        answer = super()._run()
        return reordered(tree_map_only(torch.Tensor, cloned, answer), fields_of(answer))


class _OfParts(Probe):
    """A call of items that eager mode answers one by one: a graph has to treat them so as well.

    Whether eager mode itself does so is seen on the first two items of the first such call.
    """

    def __init__(
        self,
        call: Mapping[str, Any],
        parts: Sequence[Probe],
        model: SupportsEncoderCudaGraph,
        backend: GraphBackend,
        alone: dict[Hashable, bool],
        kind: Hashable,
    ) -> None:
        super().__init__(call, model, backend)
        self._parts = parts
        self._alone = alone
        self._kind = kind

    def tensors(self, flat: Flat, layout: OutputLayout) -> Sequence[torch.Tensor]:
        if self._kind not in self._alone:
            pair = Probe(self._model.select_items(self.call, [0, 1]), self._model, self._backend)
            together = pair.tensors(flat, layout)
            parts = layout.joined([part.tensors(flat, layout) for part in self._parts[:2]])
            self._alone[self._kind] = largest_error(parts, together) <= max_error(together)
        if not self._alone[self._kind]:
            return super().tensors(flat, layout)
        return layout.joined([part.tensors(flat, layout) for part in self._parts])


class Probes:
    """The probes of an encoder by key; in a capture those of its graphs are often the same calls.

    In a capture up front eager mode takes longer than all else, so it answers no call twice, and
    no item that has a name.
    """

    def __init__(
        self, model: SupportsEncoderCudaGraph, facts: EncoderFacts, backend: GraphBackend
    ) -> None:
        self._model = model
        self._facts = facts
        self._backend = backend
        self._remembered: list[Probe] = []
        self._named: OrderedDict[Hashable, Probe] = OrderedDict()
        self._alone: dict[Hashable, bool] = {}
        """By signature: whether eager mode gives an item the same answer in any company."""
        self._depth = 0
        self._for_many = False

    @contextmanager
    def remembered(self, *, for_many: bool = False) -> Iterator[None]:
        """Within the block the last few probes and their answers are kept; then nothing is.

        Args:
            for_many: Whether so many graphs are captured that items will come again.
        """
        self._depth += 1
        outer, self._for_many = self._for_many, self._for_many or for_many
        try:
            yield
        finally:
            self._depth -= 1
            self._for_many = outer
            if not self._depth:
                self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self._remembered.clear()
        self._named.clear()
        self._alone.clear()

    def of(self, key: GraphKey) -> Sequence[Probe]:
        """The calls that a graph of `key` is checked with; none for an encoder that names none."""
        if self._facts.probes is None:
            return ()
        return [self._probe(call, key.signature) for call in self._facts.probes(key)]

    def _probe(self, call: Mapping[str, Any], signature: Hashable) -> Probe:
        if isinstance(call, ProbeCall):
            return self._of_names(call, signature)
        for probe in self._remembered:
            if _equal(probe.call, call):
                return probe
        probe = Probe(call, self._model, self._backend)
        if self._depth:
            self._remembered[:] = [*self._remembered[1 - _REMEMBERED :], probe]
        return probe

    def _of_names(self, call: ProbeCall, signature: Hashable) -> Probe:
        if len(call.names) == 1:
            return self._of_name(call.names[0], lambda: call)
        if not self._for_many:
            return Probe(call, self._model, self._backend)
        parts = [
            self._of_name(name, partial(self._model.select_items, call, [i]))
            for i, name in enumerate(call.names)
        ]
        return _OfParts(call, parts, self._model, self._backend, self._alone, signature)

    def _of_name(self, name: Hashable, call: Callable[[], Mapping[str, Any]]) -> Probe:
        probe = self._named.get(name)
        if probe is None:
            probe = _Kept(call(), self._model, self._backend)
            if self._depth:
                self._named[name] = probe
                if len(self._named) > _NAMED:
                    self._named.popitem(last=False)
        else:
            self._named.move_to_end(name)
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
