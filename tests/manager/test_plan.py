"""Plans: every item goes somewhere, and whatever replays it is large enough in every way."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmgraph import EncoderBatch, EncoderItemSpec, GraphKey, Reason
from mmgraph.manager import Eager, Plan, Replay
from mmgraph.manager.plan import Planner
from mmgraph.manager.planned import Graphs
from mmgraph.manager.prices import Measured
from mmgraph.policy import Bin

BUDGETS = (64, 256, 1024)
SIGNATURE = "signature"


def image(tokens: int, frames: int = 1) -> EncoderItemSpec:
    """An item of `frames` equal segments, with windows of 16 as a second kind."""
    length = tokens // frames
    return EncoderItemSpec(tokens, (frames, -(-tokens // 16)), (length, min(length, 16)))


def batch_of(*items: EncoderItemSpec) -> EncoderBatch:
    return EncoderBatch(items, SIGNATURE)


def key(tokens: int, segments: Any = (1, 4), seqlen: Any = (64, 16)) -> GraphKey:
    return GraphKey(tokens, segments, seqlen, SIGNATURE)


def graphs(*captured: GraphKey, lazy: bool = True, failed: Any = None, **more: Any) -> Graphs:
    return Graphs(captured, failed or {}, lazy, **more)


def general(tokens: int) -> GraphKey:
    """A key that takes whatever a budget holds, up to 16 segments of it."""
    return key(tokens, (16, 64), (tokens, 16))


def scarce(*captured: GraphKey, **more: Any) -> Graphs:
    """Another signature gave the examples."""
    return graphs(*captured, general=lambda budget: general(budget).of("example"), **more)


items = st.tuples(st.integers(1, 40), st.integers(1, 6)).map(lambda a: image(a[0] * a[1], a[1]))
batches = st.lists(items, max_size=10).map(lambda i: batch_of(*i))
keys = st.builds(
    key,
    st.sampled_from(BUDGETS),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 16, 64])),
    st.tuples(st.sampled_from([16, 64, 256]), st.just(16)),
)


@settings(deadline=None)
@given(
    batches,
    st.lists(keys, max_size=6, unique=True),
    st.lists(keys, max_size=3),
    st.booleans(),
    st.sampled_from([graphs, scarce]),
)
def test_every_item_is_planned_once_and_fits_where_it_goes(
    batch: EncoderBatch, captured: list[GraphKey], failed: list[GraphKey], lazy: bool, make: Any
) -> None:
    failed = [k for k in failed if k not in captured]
    state = make(*captured, lazy=lazy, failed=dict.fromkeys(failed, Reason.CAPTURE_FAILED))
    plan = Planner(BUDGETS).plan(batch, state)
    parts = [*plan.replays, *plan.eager]
    assert sorted(i for part in parts for i in part.items) == list(range(len(batch.items)))
    for replay in plan.replays:
        served = [batch.items[i] for i in replay.items]
        assert replay.key.signature == batch.signature
        assert replay.key not in failed
        assert lazy or replay.key in captured
        assert sum(item.num_tokens for item in served) <= replay.key.token_budget
        for kind in (0, 1):
            assert sum(i.num_segments[kind] for i in served) <= replay.key.segment_capacity[kind]
            assert max(i.max_seqlen[kind] for i in served) <= replay.key.max_seqlen[kind]
    assert len({part.reason for part in plan.eager}) == len(plan.eager)
    for part in plan.eager:
        assert list(part.items) == sorted(part.items)
        above = [batch.items[i].num_tokens > BUDGETS[-1] for i in part.items]
        assert all(above) == (part.reason is Reason.ABOVE_BUDGET) or not any(above)


@settings(deadline=None)
@given(
    st.lists(items, min_size=2, max_size=12),
    st.dictionaries(keys, st.floats(0.1, 1.0), max_size=6),
    st.lists(keys, max_size=2),
    st.one_of(st.none(), st.floats(0.1, 1.0)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([graphs, scarce]),
)
def test_what_a_planner_has_planned_before_changes_no_plan(
    images: list[EncoderItemSpec],
    seconds: dict[GraphKey, float],
    others: list[GraphKey],
    eager: float | None,
    lazy: bool,
    uniform: bool,
    make: Any,
) -> None:
    """Items that need the same key share a plan, and sizes that graphs bound alike their prices."""
    measured = Measured(seconds, {SIGNATURE: {256: eager}} if eager else {})
    state = make(*seconds, *others, lazy=lazy, measured=measured)
    planner = Planner(BUDGETS, uniform=uniform)
    for image_ in images:
        fresh = Planner(BUDGETS, uniform=uniform)
        assert planner.plan(batch_of(image_), state) == fresh.plan(batch_of(image_), state)
    together = batch_of(*images)
    assert planner.plan(together, state) == Planner(BUDGETS, uniform=uniform).plan(together, state)


def test_budgets_of_one_kind_of_call_are_not_those_of_another() -> None:
    """With one planner, and nothing that was measured in between."""
    planner, measured = Planner(BUDGETS), Measured()
    captured, of_other = key(64), key(100, (1, 8), (128, 16)).of("another kind")
    closed = graphs(captured, of_other, lazy=False, measured=measured)
    open_ = graphs(captured, of_other, lazy=True, measured=measured)
    small, large = batch_of(image(40)), batch_of(image(200))
    other = EncoderBatch((image(90),), "another kind")
    for _ in range(2):
        assert planner.plan(large, closed).replays == ()
        assert [replay.key.token_budget for replay in planner.plan(large, open_).replays] == [256]
        assert [replay.key for replay in planner.plan(other, closed).replays] == [of_other]
        assert [replay.key for replay in planner.plan(small, closed).replays] == [captured]


def test_parts_are_held_against_what_they_would_add_to_eager_mode() -> None:
    state = {
        "measured": Measured({key(64): 1e-3}, {SIGNATURE: {16: 5e-3, 64: 6e-3, 2000: 20e-3}}),
        "lazy": False,
    }
    two = (image(30), image(34))
    assert len(Planner(BUDGETS).plan(batch_of(*two), graphs(key(64), **state)).replays) == 2
    plan = Planner(BUDGETS).plan(batch_of(*two, image(2000)), graphs(key(64), **state))
    assert not plan.replays  # two replays take 2 ms, and two images more in eager mode one


@pytest.mark.parametrize(
    ("batch", "state", "plan"),
    [
        # nothing in, nothing out
        (batch_of(), graphs(), Plan((), ())),
        # no graph yet: the tightest key is asked for
        (batch_of(image(60)), graphs(), Plan((Replay((0,), key(64)),), ())),
        # no graph, and none may be captured
        (
            batch_of(image(60)),
            graphs(lazy=False),
            Plan((), (Eager((0,), Reason.NOT_CAPTURED),)),
        ),
        # the limit on graphs is reached: the reason says so
        (
            batch_of(image(60)),
            graphs(lazy=False, missing=Reason.GRAPH_LIMIT),
            Plan((), (Eager((0,), Reason.GRAPH_LIMIT),)),
        ),
        # a graph of the same budget with bounds of up to twice is near enough
        (
            batch_of(image(60)),
            graphs(key(64, (2, 8), (128, 16))),
            Plan((Replay((0,), key(64, (2, 8), (128, 16))),), ()),
        ),
        # beyond that it is not, while another may be captured
        (batch_of(image(60)), graphs(key(64, (4, 4))), Plan((Replay((0,), key(64)),), ())),
        # but it is better than eager mode
        (
            batch_of(image(60)),
            graphs(key(64, (4, 4)), lazy=False),
            Plan((Replay((0,), key(64, (4, 4))),), ()),
        ),
        # a larger budget serves where its own can't be captured
        (
            batch_of(image(60)),
            graphs(key(256), failed={key(64): Reason.CAPTURE_FAILED}),
            Plan((Replay((0,), key(256)),), ()),
        ),
        # nothing can
        (
            batch_of(image(60)),
            graphs(failed={key(64): Reason.CAPTURE_FAILED}),
            Plan((), (Eager((0,), Reason.CAPTURE_FAILED),)),
        ),
        # a graph of another signature is of no use
        (
            batch_of(image(60)),
            graphs(GraphKey(64, (1, 4), (64, 16), "another"), lazy=False),
            Plan((), (Eager((0,), Reason.NOT_CAPTURED),)),
        ),
        # too many segments for the table
        (
            batch_of(image(60, 4)),
            graphs(key(64), lazy=False),
            Plan((), (Eager((0,), Reason.NOT_CAPTURED),)),
        ),
        # no table for two images, but one for each
        (
            batch_of(image(20), image(30)),
            graphs(key(64), lazy=False),
            Plan((Replay((0,), key(64)), Replay((1,), key(64))), ()),
        ),
        # as many at once as it takes
        (
            batch_of(*[image(15)] * 4),
            graphs(key(64, (2, 4)), lazy=False),
            Plan((Replay((0, 1), key(64, (2, 4))), Replay((2, 3), key(64, (2, 4)))), ()),
        ),
        # eager mode has to run anyway, as one image has two segments
        (
            batch_of(image(20), image(30, 2)),
            graphs(key(64), lazy=False),
            Plan((), (Eager((0, 1), Reason.NOT_CAPTURED),)),
        ),
        # or is too large for what there is
        (
            batch_of(image(30), image(70)),
            graphs(key(64, (2, 8)), failed={key(256, (2, 8), (128, 16)): Reason.DIFFERED}),
            Plan((), (Eager((0, 1), Reason.DIFFERED),)),
        ),
        # what can't be captured for two images doesn't keep graphs from serving each
        (
            batch_of(image(20), image(30)),
            graphs(key(64), failed={key(64, (2, 4), (32, 16)): Reason.OUT_OF_MEMORY}),
            Plan((Replay((0,), key(64)), Replay((1,), key(64))), ()),
        ),
        # but not if that takes far more replays than is worth
        (
            batch_of(*[image(16)] * 16),
            graphs(key(256, (1, 16)), lazy=False),
            Plan((), (Eager(tuple(range(16)), Reason.NOT_CAPTURED),)),
        ),
        # room for hardly more graphs than budgets: what is captured takes whatever comes
        (batch_of(image(60)), scarce(), Plan((Replay((0,), general(64)),), ())),
        # and is near enough, however far above
        (batch_of(image(60)), scarce(general(64)), Plan((Replay((0,), general(64)),), ())),
        (batch_of(image(60)), scarce(key(64, (4, 4))), Plan((Replay((0,), key(64, (4, 4))),), ())),
        # in its budget
        (batch_of(image(60)), scarce(general(256)), Plan((Replay((0,), general(64)),), ())),
        # a larger one serves where its own can't be captured
        (
            batch_of(image(60)),
            scarce(general(256), failed={general(64): Reason.CAPTURE_FAILED}),
            Plan((Replay((0,), general(256)),), ()),
        ),
        # whose reason is the reason
        (
            batch_of(image(60)),
            scarce(failed={general(64): Reason.CAPTURE_FAILED}),
            Plan((), (Eager((0,), Reason.CAPTURE_FAILED),)),
        ),
        # more than it takes gets what it needs
        (
            batch_of(image(60, 20)),
            scarce(),
            Plan((Replay((0,), key(64, (24, 4), (4, 4))),), ()),
        ),
        # above every budget, among others: one entry a reason
        (
            batch_of(image(2000), image(60), image(1025)),
            graphs(),
            Plan((Replay((1,), key(64)),), (Eager((0, 2), Reason.ABOVE_BUDGET),)),
        ),
        # above what was captured, but not above the budgets
        (
            batch_of(image(300), image(2000)),
            graphs(key(256), lazy=False),
            Plan((), (Eager((0,), Reason.NOT_CAPTURED), Eager((1,), Reason.ABOVE_BUDGET))),
        ),
    ],
)
def test_plans_by_hand(batch: EncoderBatch, state: Graphs, plan: Plan) -> None:
    assert Planner(BUDGETS).plan(batch, state) == plan


def test_of_several_looser_graphs_the_tightest_is_taken() -> None:
    loose = [key(1024, (8, 64), (1024, 16)), key(256, (8, 64), (256, 16)), key(256, (2, 64))]
    plan = Planner(BUDGETS).plan(batch_of(image(60)), graphs(*loose, lazy=False))
    assert plan.replays == (Replay((0,), key(256, (2, 64))),)


def test_the_key_of_a_bin_has_the_tiers_of_its_sums_and_longest() -> None:
    batch = batch_of(image(100), image(2000), image(60, 3))
    expected = key(256, (4, 12), (128, 16))  # 1 + 3 segments, 7 + 4 windows, the longest is 100
    assert Planner(BUDGETS).key_for(batch, Bin((0, 2), 256)) == expected


def test_rows_have_keys_without_segments() -> None:
    batch = EncoderBatch((EncoderItemSpec(16),) * 3, SIGNATURE)
    (replay,) = Planner((16, 64)).plan(batch, graphs()).replays
    assert replay == Replay((0, 1, 2), GraphKey(64, signature=SIGNATURE))


@pytest.mark.parametrize(
    ("other", "covered"),
    [
        (key(64, (2, 4), (32, 16)), True),  # itself
        (key(60, (1, 1), (1, 1)), True),  # less of everything
        (key(65, (2, 4), (32, 16)), False),  # more tokens
        (key(64, (3, 4), (32, 16)), False),  # more segments of the first kind
        (key(64, (2, 5), (32, 16)), False),  # of the second
        (key(64, (2, 4), (33, 16)), False),  # longer ones of the first kind
        (key(64, (2, 4), (32, 17)), False),  # of the second
        (GraphKey(64, (2, 4), (32, 16), "another"), False),  # another signature
    ],
)
def test_a_key_covers_what_is_no_larger_in_any_way(other: GraphKey, covered: bool) -> None:
    assert key(64, (2, 4), (32, 16)).covers(other) is covered


def test_two_keys_joined_are_the_least_that_covers_both() -> None:
    one, many = key(64, (1, 4), (64, 16)), key(64, (8, 3), (32, 16))
    joined = one.joined(many)
    assert joined == many.joined(one) == key(64, (8, 4), (64, 16))
    assert joined.covers(one)
    assert joined.covers(many)


@pytest.mark.parametrize("expression", ["GraphKey(64, (), (), 'a')", "EncoderBatch((), 'a')"])
def test_keys_from_another_process_are_found(expression: str) -> None:
    code = (
        "import base64, pickle; from mmgraph import EncoderBatch, GraphKey; "
        f"print(base64.b64encode(pickle.dumps({expression})).decode())"
    )
    other = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=other
    )
    ours, theirs = eval(expression), pickle.loads(base64.b64decode(done.stdout))
    assert theirs == ours
    assert theirs in {ours}
