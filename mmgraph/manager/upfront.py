"""Capturing all budgets of an encoder before it serves, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain, dropwhile

from mmgraph.config import GraphConfig
from mmgraph.errors import CaptureError
from mmgraph.graphs import GraphBackend, clean_up, freeze_gc_for_cudagraph_capture, select_backend
from mmgraph.graphs.backend import ran_out_of_memory
from mmgraph.log import get_logger
from mmgraph.manager.plan import JOINED_FROM, Planner
from mmgraph.manager.store import GraphStore
from mmgraph.policy import Bin
from mmgraph.types import EncoderFacts, GraphKey, Reason

__all__ = ["UpFront", "estimate"]

_logger = get_logger(__name__)


class UpFront:
    """What ``capture()`` records of one encoder; used under the manager's lock `lock`."""

    def __init__(
        self,
        config: GraphConfig,
        facts: EncoderFacts,
        planner: Planner,
        store: GraphStore,
        lock: AbstractContextManager[object],
    ) -> None:
        self.store = store
        self.lock = lock
        self._config = config
        self._facts = facts
        self._planner = planner

    def keys(self) -> list[GraphKey]:
        """All keys that aren't captured yet, the largest first."""
        if self._config.mode == "piecewise":
            return []  # graphs of exact calls only
        keys = chain.from_iterable(map(self.keys_of, reversed(self._planner.budgets)))
        return [key for key in keys if key not in self.store.entries]

    def keys_of(self, budget: int) -> Iterable[GraphKey]:
        """The keys of the examples; of a large budget as few as take them all.

        Raises:
            UnsupportedModelError: There are no examples before the encoder has been called.
        """
        keys: dict[Hashable, GraphKey] = {}
        for batch in self._facts.examples(budget, self._config.max_items):
            items = tuple(range(len(batch.items)))
            key = self._planner.key_for(batch, Bin(items, budget), for_any=True)
            kind = key if budget < JOINED_FROM else (key.signature, _magnitudes(key.max_seqlen))
            keys[kind] = keys[kind].joined(key) if kind in keys else key
        return keys.values()

    def keys_with_room(self) -> list[GraphKey]:
        """Those of them that ``max_graphs`` leaves room for."""
        return self.keys()[: max(0, self._config.max_graphs - len(self.store.entries))]

    def capture(self, progress: Callable[[GraphKey], None] | None) -> int:
        """Capture them with the collector frozen; return the bytes that it took.

        Raises:
            CaptureError: See ``EncoderCudaGraphManager.capture``.
        """
        before, graphs_before = self.store.num_bytes, len(self.store.entries)
        no_memory: CaptureError | None = None
        with freeze_gc_for_cudagraph_capture(), self.store.probes.remembered(for_many=True):
            for key in self.keys():
                if len(self.store.entries) >= self._config.max_graphs:
                    _logger.warning(
                        "%s: no room for graphs of %s tokens and of others: max_graphs is %d",
                        self._facts.name,
                        key.token_budget,
                        self._config.max_graphs,
                    )
                    break
                if progress is not None:
                    progress(key)
                error = self.store.capture(key)
                if error is None or self.store.entries:
                    continue
                if not (ran_out_of_memory(error) or self._exceeds(key)):
                    raise error
                no_memory = no_memory or error  # a smaller budget may fit
        if no_memory is not None and not self.store.entries:
            raise no_memory
        num_bytes = self.store.num_bytes - before
        _logger.info(
            "%s: %d graphs captured, %.1f MiB",
            self._facts.name,
            len(self.store.entries) - graphs_before,
            num_bytes / 2**20,
        )
        return num_bytes

    def _exceeds(self, key: GraphKey) -> bool:
        return key in self.store.too_large

    def missing(self) -> Reason | None:
        """Why the largest key that isn't captured isn't; ``None`` if all are."""
        for key in self.keys():
            limit = Reason.MEMORY_LIMIT if self._exceeds(key) else Reason.GRAPH_LIMIT
            return self.store.failed.get(key, limit)
        return None


def _magnitudes(lengths: Sequence[int]) -> tuple[int, ...]:
    """Equal for lengths that are about the same: a bound far above them costs attention time."""
    return tuple([length.bit_length() for length in lengths])


def estimate(parts: Sequence[UpFront]) -> int:
    """Bytes that capturing `parts` one after the other would take; of the attempt nothing remains.

    Parts that share a backend share a pool here too. Captured are the largest key of each
    signature and two smaller ones: all graphs of a pool live in the memory of the largest, and what
    the last of three still adds, each further one adds.

    Raises:
        CaptureError: Not one graph of a part can be captured.
    """
    twins: dict[int, GraphBackend] = {}
    total = 0
    with ExitStack() as stack, freeze_gc_for_cudagraph_capture():
        for part in parts:
            stack.enter_context(part.lock)
        for part in parts:
            backend = part.store.backend
            if id(backend) not in twins:
                twins[id(backend)] = select_backend(backend.name, part.store.device)
            store = part.store.twin(twins[id(backend)])
            stack.callback(store.clear)
            total += _estimate_graphs(store, part.keys_with_room())
            total += sum(
                arena.num_bytes
                for signature, arena in store.arenas.items()
                if signature not in part.store.arenas
            )
    clean_up()
    return total


def _estimate_graphs(store: GraphStore, keys: Sequence[GraphKey]) -> int:
    total, errors = 0, list[CaptureError]()

    def fails(key: GraphKey) -> bool:
        error = store.attempt(key)
        if error is None:
            return False
        errors.append(error)
        if not store.entries and not ran_out_of_memory(error):
            raise error  # as in a capture up front
        return True

    for signature in dict.fromkeys(key.signature for key in keys):
        ladder = [key for key in keys if key.signature == signature]
        ladder = list(dropwhile(fails, ladder))
        if not ladder:
            continue
        rest = ladder[1:]
        for key in dict.fromkeys((*rest[len(rest) // 2 :][:1], *rest[-1:])):
            fails(key)
        sizes = [e.graph.num_bytes for k, e in store.entries.items() if k.signature == signature]
        total += sum(sizes) + (len(ladder) - len(sizes)) * sizes[-1]
    if errors and not store.entries:
        raise errors[0]
    return total
