"""What eager mode takes: the other side of the question whether a replay is worth it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from mmgraph.graphs import GraphBackend, clean_up
from mmgraph.graphs.backend import without_frames
from mmgraph.manager.probes import Probe, Probes
from mmgraph.manager.slopes import Slope
from mmgraph.manager.verify import shortest
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey

__all__ = ["EagerTimes"]

_CLEARLY = 3.0
"""Times as long as a replay, from which the one run of a check will do for the price."""

_AS_MANY = 0.1
"""Part of its tokens by which another call may differ and still be of the same size."""


class EagerTimes:
    """Times calls in eager mode when graphs are captured, never while serving.

    Attributes:
        seconds: By the tokens of a call, for each call signature.
        alike: Tokens and seconds of the call that a graph was checked with, by its key, where
            another call of as many tokens doesn't leave it clear that the graph is faster.
        slopes: What calls of as many tokens take more for their attention, by signature.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        facts: EncoderFacts,
        backend: GraphBackend,
        probes: Probes,
    ) -> None:
        self.seconds: dict[Hashable, dict[int, float]] = {}
        self.alike: dict[GraphKey, tuple[int, float]] = {}
        self.slopes: dict[Hashable, Slope] = {}
        self._model = model
        self._facts = facts
        self._backend = backend
        self._probes = probes

    @torch.no_grad()
    def measure(self, key: GraphKey, replay: float, *, again: bool = False) -> float:
        """Time the call that a graph of `key` was checked with, and once the smallest one.

        Args:
            key: The graph.
            replay: Seconds that it takes.
            again: Whether to time what was timed before, and keep the longer time.

        Returns:
            Seconds of that call; infinity where it can't be timed.
        """
        if self._facts.probes is None:
            return float("inf")
        known = self.seconds.setdefault(key.signature, {})
        try:
            if not known:  # what a call costs however small it is
                self._time(self._smallest(key), known)
            return self._time(key, known, replay, again=again)
        except torch.OutOfMemoryError as error:  # the graph is there all the same
            without_frames(error)
            self._probes.forget()
            clean_up()
            return float("inf")

    def _time(
        self, key: GraphKey, known: dict[int, float], replay: float = 0.0, *, again: bool = False
    ) -> float:
        probe, *others = self._probes.of(key)
        num_tokens, squares = self._held(probe)
        before = known.get(num_tokens)
        if before is not None and not again and (not replay or before >= _CLEARLY * replay):
            return before
        seconds = probe.seconds
        if seconds is None or seconds < _CLEARLY * replay or not replay or again:
            seconds = self._shortest(probe)
        if again:
            seconds = max(seconds, self.alike.get(key, (0, 0.0))[1])
            known[num_tokens] = max(seconds, known.get(num_tokens, 0.0))
        known.setdefault(num_tokens, seconds)
        if replay and seconds < _CLEARLY * replay:
            self.alike[key] = num_tokens, seconds
            for other in others if not again else ():
                tokens, held = self._held(other)
                slope = self.slopes.setdefault(key.signature, Slope())
                as_many = abs(num_tokens - tokens) < _AS_MANY * num_tokens
                if as_many and slope.hears(squares - held):
                    slope.add(seconds - self._shortest(other), squares - held)
        return seconds

    def _shortest(self, probe: Probe) -> float:
        return shortest(self._backend, partial(self._model.embed_multimodal, **probe.call))

    def _held(self, probe: Probe) -> tuple[int, int]:
        """Tokens and squares of its items."""
        items = self._model.item_specs(probe.call).items
        return sum([item.num_tokens for item in items]), sum([item.squares for item in items])

    def clear(self) -> None:
        """Forget everything."""
        self.seconds.clear()
        self.alike.clear()
        self.slopes.clear()

    def _smallest(self, key: GraphKey) -> GraphKey:
        """A key for one small item, of the kind of `key`."""
        tokens = max(self._facts.min_tokens, self._facts.tokens_per_row)
        return GraphKey(
            tokens,
            tuple(1 for _ in key.segment_capacity),
            tuple(tokens for _ in key.max_seqlen),
            key.signature,
        )
