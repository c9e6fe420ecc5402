"""What eager mode takes: the other side of the question whether a replay is worth it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from mmgraph.graphs import GraphBackend, clean_up
from mmgraph.graphs.backend import without_frames
from mmgraph.manager.verify import shortest
from mmgraph.protocol import SupportsEncoderCudaGraph
from mmgraph.types import EncoderFacts, GraphKey

__all__ = ["EagerTimes"]


class EagerTimes:
    """Times calls in eager mode when graphs are captured, never while serving.

    Attributes:
        seconds: By the tokens of a call, for each call signature.
    """

    def __init__(
        self, model: SupportsEncoderCudaGraph, facts: EncoderFacts, backend: GraphBackend
    ) -> None:
        self.seconds: dict[Hashable, dict[int, float]] = {}
        self._model = model
        self._facts = facts
        self._backend = backend

    @torch.no_grad()
    def measure(self, key: GraphKey, *, again: bool = False) -> float:
        """Time the call that a graph of `key` was checked with, and once the smallest one.

        Args:
            key: The graph.
            again: Whether to time what was timed before, and keep the longer time.

        Returns:
            Seconds of that call; infinity where it can't be timed.
        """
        if self._facts.probes is None:
            return float("inf")
        known = self.seconds.setdefault(key.signature, {})
        try:
            if not known:  # what a call costs however small it is
                self._time(self._smallest(key), known, again=False)
            return self._time(key, known, again=again)
        except torch.OutOfMemoryError as error:  # the graph is there all the same
            without_frames(error)
            clean_up()
            return float("inf")

    def _time(self, key: GraphKey, known: dict[int, float], *, again: bool) -> float:
        assert self._facts.probes is not None
        call = self._facts.probes(key)[0]
        num_tokens = sum(item.num_tokens for item in self._model.item_specs(call).items)
        if again or num_tokens not in known:
            seconds = shortest(self._backend, partial(self._model.embed_multimodal, **call))
            known[num_tokens] = max(seconds, known.get(num_tokens, 0.0))
        return known[num_tokens]

    def _smallest(self, key: GraphKey) -> GraphKey:
        """A key for one small item, of the kind of `key`."""
        tokens = max(self._facts.min_tokens, self._facts.tokens_per_row)
        return GraphKey(
            tokens,
            tuple(1 for _ in key.segment_capacity),
            tuple(tokens for _ in key.max_seqlen),
            key.signature,
        )
