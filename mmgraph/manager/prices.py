"""What the replays of a batch cost, and eager mode, as far as that was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mmgraph.policy import EAGER, REPLAY, Curve
from mmgraph.types import GraphKey

__all__ = ["PER_REPLAY", "Measured", "Prices", "Savings", "in_eager", "saving"]

PER_REPLAY = 30e-6
"""Seconds of what goes with a replay: copies into buffers and out of them, and their launches."""

_CLEARLY = 0.98
_ONCE = 0.5
"""Of what the smallest call takes in eager mode, the part that a larger one takes once as well.

On an H200 the smallest call of Qwen3-VL-8B takes 17 ms, two pages of 80 ms each take 149, and three
that take 202 one by one 186. The other half is time in which the GPU waits for the host.
"""
_LEAST = 0.1
"""Of what a replay was measured at, the part that is there whatever the call holds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the graphs of an encoder and its eager mode took; empty where nothing is timed.

    Attributes:
        replays: Seconds of a replay by key.
        eager: Seconds of a call in eager mode by its tokens, for each call signature.
        alike: Seconds in eager mode of the very call that a graph was timed with, and its tokens,
            where those of a call of as many tokens don't say enough.
        squares: What that call holds of ``EncoderItemSpec.squares``, by key.
        slopes: Seconds of a replay that one of these takes, for each call signature; 0 or more.
        eager_slopes: The same in eager mode.
    """

    replays: Mapping[GraphKey, float] = field(default_factory=dict)
    eager: Mapping[Hashable, Mapping[int, float]] = field(default_factory=dict)
    alike: Mapping[GraphKey, tuple[int, float]] = field(default_factory=dict)
    squares: Mapping[GraphKey, int] = field(default_factory=dict)
    slopes: Mapping[Hashable, float] = field(default_factory=dict)
    eager_slopes: Mapping[Hashable, float] = field(default_factory=dict)

    def replay(self, key: GraphKey, squares: int | None = None) -> float | None:
        """Seconds of a replay of `key`; ``None`` where that was never measured.

        Args:
            key: The graph.
            squares: What the call holds of ``EncoderItemSpec.squares``; ``None`` for as much as the
                call that the graph was timed with.
        """
        seconds = self.replays.get(key)
        if seconds is None or squares is None or key.uniform or key not in self.squares:
            return seconds
        less = self.slopes.get(key.signature, 0.0) * (self.squares[key] - squares)
        return max(_LEAST * seconds, seconds - less)


class Prices:
    """Costs for batches of one kind.

    Args:
        signature: Of the batches.
        longest: Their longest segment of each kind of attention.
        keys: Graphs of that signature.
        measured: What is known of them.
    """

    def __init__(
        self,
        signature: Hashable,
        longest: Sequence[int],
        keys: Sequence[GraphKey],
        measured: Measured,
    ) -> None:
        self._measured = measured
        points = _points(keys, longest, measured)
        self._replays = Curve(points, int(REPLAY.fixed)) if points else None
        eager = measured.eager.get(signature)
        self._eager = Curve(eager, int(EAGER.fixed), floor=True) if eager else None

    @property
    def are_measured(self) -> bool:
        """Whether costs are seconds."""
        return self._replays is not None

    def of_budgets(self, budgets: Sequence[int]) -> list[float]:
        """What a replay of each budget costs: seconds, or tokens where nothing was measured.

        Without what its items' squares cost, as far as that is known: that is the same in all.
        """
        if self._replays is None:
            return [REPLAY(budget) for budget in budgets]
        return [PER_REPLAY + self._replays(budget) for budget in budgets]

    def of_graph(self, key: GraphKey, squares: int) -> float | None:
        """What a replay of `key` costs, as ``of_budgets`` counts it; ``None`` if that isn't known.

        Args:
            key: Of a graph.
            squares: See :meth:`Measured.replay`.
        """
        if self._replays is None:
            return REPLAY(key.token_budget)
        seconds = self._measured.replay(key, squares)
        if seconds is None:
            return None
        return PER_REPLAY + seconds - self._measured.slopes.get(key.signature, 0.0) * squares

    def of_replays(self, keys: Sequence[GraphKey], squares: Sequence[int]) -> float | None:
        """Seconds of replays of `keys` together; ``None`` where one was never measured."""
        seconds = 0.0
        for key, held in zip(keys, squares, strict=True):
            replay = self._measured.replay(key, held)
            if replay is None:
                return None
            seconds += PER_REPLAY + replay
        return seconds

    def of_eager(self, num_tokens: int) -> float | None:
        """Seconds of a call in eager mode; ``None`` where it was never measured."""
        return None if self._eager is None else self._eager(num_tokens)

    def of_eager_instead(
        self, keys: Sequence[GraphKey], tokens: Sequence[int], squares: Sequence[int | None]
    ) -> float | None:
        """Seconds of one call in eager mode for what replays of `keys` would serve.

        A replay is timed on segments as long as its key allows. Where eager mode was timed on the
        same ones the two can be compared; as many tokens in other segments cost something else.

        Args:
            keys: Of the replays.
            tokens: What each would serve.
            squares: What each would hold, see :meth:`Measured.replay`.
        """
        if self._eager is None:
            return None
        measured = self._measured
        alike = [measured.alike.get(key) for key in keys]
        if not any(alike):
            return self._eager(sum(tokens))
        least = min([self._eager(0), *(own[1] for own in alike if own is not None)])
        once, above = _ONCE * least, 0.0
        for key, own, num_tokens, held in zip(keys, alike, tokens, squares, strict=True):
            if own is None:
                above += max(0.0, self._eager(num_tokens) - once)
                continue
            part = num_tokens / own[0]
            seconds = (own[1] - once) * part
            if held is not None and key in measured.squares:
                slope = measured.eager_slopes.get(key.signature, 0.0)
                seconds += slope * (held - measured.squares[key] * part)
            above += max(0.0, seconds)
        return max(least, once + above)

    def eager_is_cheaper(
        self, keys: Sequence[GraphKey], tokens: Sequence[int], squares: Sequence[int]
    ) -> bool:
        """Whether a call in eager mode is clearly cheaper than replays of `keys`.

        Args:
            keys: Of the replays.
            tokens: What each would serve.
            squares: What each would hold, see :meth:`Measured.replay`.
        """
        replays = self.of_replays(keys, squares)
        eager = None if replays is None else self.of_eager_instead(keys, tokens, squares)
        return replays is not None and eager is not None and eager < _CLEARLY * replays


def saving(key: GraphKey, measured: Measured, gone: Collection[GraphKey] = ()) -> float:
    """Seconds that a replay of `key` saves, as far as they are known; a millisecond otherwise.

    Args:
        key: A graph that there is, or may be.
        measured: What is known.
        gone: Graphs that won't be there any more. What else takes the calls of `key` is what it
            saves against: another graph, or eager mode.
    """
    eager = in_eager(key, key.token_budget, measured)
    replay = measured.replays.get(key)
    if replay is None and eager is not None:
        replay = _expected(key, measured)
    if replay is None or eager is None:
        return 1e-3
    instead = eager - PER_REPLAY
    held = _squares(key, measured)
    for other in measured.replays:
        seconds = measured.replay(other, held)
        # Which covers which is asked last: it takes the longest.
        if (
            seconds is not None
            and seconds < instead
            and other.token_budget >= key.token_budget
            and other not in gone
            and other != key
            and other.covers(key)
        ):
            instead = seconds
    return max(1e-9, instead - replay)


class Savings:
    """What a use of each graph saves, which is asked again at each call that waits for one.

    Args:
        measured: Gives what is known; another object once that changed.
    """

    def __init__(self, measured: Callable[[], Measured]) -> None:
        self._measured = measured
        self._of: Measured | None = None
        self._known: dict[GraphKey, float] = {}

    def __call__(self, key: GraphKey) -> float:
        """Seconds, see :func:`saving`."""
        measured = self._measured()
        if self._of is not measured:
            self._of, self._known = measured, {}
        if key not in self._known:
            self._known[key] = saving(key, measured)
        return self._known[key]


def _squares(key: GraphKey, measured: Measured) -> int | None:
    """What a call holds that `key` is timed with; ``None`` if that isn't known."""
    if key.uniform and key.uniform[0]:
        return key.segment_capacity[0] * key.max_seqlen[0] ** 2
    return measured.squares.get(key)


def _expected(key: GraphKey, measured: Measured) -> float | None:
    """Seconds of a replay of `key` by those of other budgets, if there are any."""
    points = {
        k.token_budget: s for k, s in measured.replays.items() if k.signature == key.signature
    }
    return Curve(points, int(REPLAY.fixed))(key.token_budget) if points else None


def in_eager(key: GraphKey, num_tokens: int, measured: Measured) -> float | None:
    """Seconds in eager mode of a call of the kind of `key`; ``None`` where that isn't known."""
    known = measured.eager.get(key.signature)
    if known and key in measured.alike:
        return Prices(key.signature, (), (), measured).of_eager_instead([key], [num_tokens], [None])
    return Curve(known, int(EAGER.fixed), floor=True)(num_tokens) if known else None


def _points(
    keys: Sequence[GraphKey], longest: Sequence[int], measured: Measured
) -> dict[int, float]:
    """Seconds by budget of graphs that take segments as long as `longest`, or come close to it."""
    fitting: dict[int, float] = {}
    others: dict[int, float] = {}
    for key in keys:
        seconds = measured.replay(key, 0)
        if seconds is not None and not key.uniform:  # one for segments of one length serves few
            budget = key.token_budget
            fits = all(a >= min(b, budget) for a, b in zip(key.max_seqlen, longest, strict=True))
            if fits:
                fitting[budget] = min(seconds, fitting.get(budget, seconds))
            else:
                others[budget] = max(seconds, others.get(budget, 0.0))
    return {**others, **fitting}
