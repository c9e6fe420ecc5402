"""A graph in half precision that is too far from eager mode gets a second opinion in float32."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mmgraph import (
    CaptureError,
    EncoderCudaGraphManager,
    GraphConfig,
    GraphKey,
    Reason,
    attach,
)
from mmgraph.encoders import TowerEncoder, encoder_for, find_towers
from mmgraph.graphs import flatten, select_backend
from mmgraph.manager.judge import Judge
from mmgraph.modules import placement
from mmgraph.protocol import SupportsReference
from mmgraph.recipes import load_recipe
from mmgraph.types import ExactCall
from tests.encoders.cases import LAYOUTS, call_of
from tests.faults.encoders import Probed
from tests.manager.engine import CPU, lengths_of
from tests.manager.engine import call_of as patches_of

BF16 = torch.bfloat16
TOKENS = 256
"""Of a call: the error of few numbers is mostly chance."""
_precision = torch._C._get_fp32_precision_getter
_set_precision = torch._C._set_fp32_precision_setter
PLACES = [
    ("generic", "all"),
    *(("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")),
]


class Rough(nn.Module):
    """Loses bits: how many depends on the offset, which ones on its sign."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.offset) - self.offset

    @contextmanager
    def other_way(self, by: float = -1.0) -> Iterator[None]:
        before = self.offset
        self.offset *= by
        try:
            yield
        finally:
            self.offset = before


class RoughEngine(Probed):
    """An encoder of an engine whose graphs round in another way than eager mode.

    Attributes:
        asked: How often it ran in float32.
        factor: By which graphs are wrong.
        wrong_rows: First rows of the output that graphs get wrong.
    """

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__(max_tokens=TOKENS)
        self.rough = Rough(256.0)
        self.asked, self.factor, self.wrong_rows = 0, 1.0, 0
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.requires_grad_(False).to(dtype).eval()

    def _probes(self, key: GraphKey) -> Sequence[Mapping[str, Any]]:
        call = patches_of([key.token_budget])
        return [{**call, "patches": call["patches"].to(self.merge.weight.dtype)}]

    def encoder_forward(self, buffers: Mapping[str, torch.Tensor], key: GraphKey) -> torch.Tensor:
        return self._for_graphs(partial(super().encoder_forward, buffers, key))

    def _for_graphs(self, run: Any) -> Any:
        with self.rough.other_way():
            output = run()
        rows = torch.arange(output.shape[0])[:, None]
        return torch.where(rows < self.wrong_rows, 1.0, output * self.factor)

    def _encode(self, patches: Any, ends: Any, max_seqlen: int, signature: Any) -> torch.Tensor:
        return self.rough(super()._encode(patches, ends, max_seqlen, signature))

    def embed_in_float32(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        self.asked += 1
        assert mm_kwargs["patches"].dtype == torch.float32
        return copy.deepcopy(self).float().embed_multimodal(**mm_kwargs)


class ExactRoughEngine(RoughEngine):
    """Its calls can have graphs of their own as well."""

    def exact_call(self, mm_kwargs: Mapping[str, Any]) -> ExactCall:
        lengths = lengths_of(mm_kwargs)
        contents = {"patches": mm_kwargs["patches"]}
        return ExactCall(tuple(lengths), contents, {"lengths": mm_kwargs["lengths"]}, sum(lengths))

    def exact_forward(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return [self._for_graphs(lambda: self.embed_multimodal(**mm_kwargs)[0])]


def cast(call: dict[str, Any], dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in call.items()}


def manager_of(encoder: Any, dtype: torch.dtype = BF16) -> EncoderCudaGraphManager:
    backend = select_backend("trace", CPU)
    return EncoderCudaGraphManager(GraphConfig(), CPU, dtype, encoder, backend=backend)


def served(manager: EncoderCudaGraphManager, dtype: torch.dtype = BF16) -> int:
    """Whether a graph serves a call; whoever does, the answer is about right."""
    call = cast(patches_of([TOKENS]), dtype)
    (output,) = manager.execute(call)
    encoder: Any = manager.model
    (expected,) = encoder.embed_multimodal(**call)
    assert float((output - expected).float().norm() / expected.float().norm()) < 0.25
    return manager.stats().hits


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_graph_as_near_to_float32_as_eager_mode_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmgraph")
    encoder = RoughEngine()
    assert isinstance(encoder, SupportsReference)
    assert served(manager_of(encoder)) == 1
    assert encoder.asked
    assert "and is as near to float32" in caplog.text
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("fault", [{"factor": 1.3}, {"wrong_rows": 1}], ids=["factor", "row"])
def test_a_graph_that_is_further_from_float32_is_refused(
    fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = RoughEngine()
    vars(encoder).update(fault)
    manager = manager_of(encoder)
    assert served(manager) == 0
    assert encoder.asked
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}
    (warning,) = warnings_in(caplog)
    assert "its graph differs from eager mode by" in warning
    assert "against float32 it is off by" in warning


def test_float32_gets_no_second_opinion() -> None:
    encoder = RoughEngine(torch.float32)
    encoder.factor = 1.01  # more than float32 may differ, less than half precision may
    assert served(manager_of(encoder, torch.float32), torch.float32) == 0
    assert encoder.asked == 0


def test_what_is_near_eager_mode_needs_no_second_opinion() -> None:
    encoder = RoughEngine()
    encoder.rough = Rough(4.0)
    assert served(manager_of(encoder)) == 1
    assert encoder.asked == 0


@pytest.mark.parametrize(("factor", "hits"), [(1.0, 1), (1.3, 0)])
def test_graphs_of_exact_calls_get_one_too(factor: float, hits: int) -> None:
    encoder = ExactRoughEngine()
    encoder.factor = factor
    manager = manager_of(encoder)
    call = cast(patches_of([2 * TOKENS]))
    for _ in range(2):
        manager.execute(call)
    assert encoder.asked
    assert manager.stats().hits == hits


FAILURES = [
    ValueError("no such kernel"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", FAILURES, ids=["error", "memory", "library"])
def test_without_an_opinion_the_graph_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def failing(**_: Any) -> Any:
        filling = torch.ones(4)
        held.append(weakref.ref(filling))
        raise error

    encoder = RoughEngine()
    monkeypatch.setattr(encoder, "embed_in_float32", failing)
    manager = manager_of(encoder)
    before = [_precision(*place) for place in PLACES]
    assert served(manager) == 0
    assert [_precision(*place) for place in PLACES] == before
    assert manager.stats().misses == {Reason.CAPTURE_FAILED: 1}  # and not for want of memory
    (warning,) = warnings_in(caplog)
    assert "its graph differs from eager mode by" in warning
    assert held
    assert all(tensor() is None for tensor in held)


# ------------------------------------------------------------------ what is asked, and how it ends


class Oracle:
    """Says what is right; `inside` is called meanwhile."""

    def __init__(self, *answers: torch.Tensor, inside: Any = None) -> None:
        self.answers, self.inside = answers, inside

    def embed_multimodal(self, **_: Any) -> Any:
        pytest.fail("eager mode was asked again")

    def embed_in_float32(self, **_: Any) -> Any:
        if self.inside is not None:
            self.inside()
        return self.answers


RIGHT = torch.arange(1.0, 101.0).repeat(400)


def off(by: float, right: torch.Tensor = RIGHT, every: int = 1) -> torch.Tensor:
    """A tensor in bfloat16 that is about `by` from `right`, up and down in turns of `every`."""
    signs = 1 - 2 * (torch.arange(right.numel()) // every % 2)
    return (right * (1 + by * signs.view(right.shape))).to(BF16)


def flat(output: Any) -> list[torch.Tensor]:
    return flatten(output)[0]


def judge(oracle: object, ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> None:
    Judge(oracle, "tower").check({}, ours, eager, flat)


def test_the_bound_is_a_tenth_more_than_eager_mode_s_own_error() -> None:
    judge(Oracle(RIGHT), [off(0.215, every=2)], [off(0.2)])
    with pytest.raises(CaptureError, match=r"off by 2.3e-01, eager mode by 2.0e-01"):
        judge(Oracle(RIGHT), [off(0.23, every=2)], [off(0.2)])


def test_the_errors_of_few_elements_may_part_by_chance() -> None:
    few = RIGHT[:400]
    ours, eager = off(0.25, few, every=2), off(0.2, few)
    judge(Oracle(few), [ours], [eager])
    with pytest.raises(CaptureError, match=r"off by 2.8e-01, eager mode by 2.0e-01"):
        judge(Oracle(few[:16]), [off(0.28, few[:16], every=2)], [off(0.2, few[:16])])
    with pytest.raises(CaptureError, match=r"off by 2.5e-01, eager mode by 2.0e-01"):
        judge(Oracle(RIGHT), [off(0.25, every=2)], [off(0.2)])


def test_every_output_must_be_as_near() -> None:
    good, bad, eager = off(0.2, every=2), off(0.3, every=2), off(0.2)
    judge(Oracle(RIGHT, RIGHT), [good, good], [eager, eager])
    with pytest.raises(CaptureError, match=r"off by 3.0e-01"):
        judge(Oracle(RIGHT, RIGHT), [good, bad], [eager, eager])
    whole = torch.arange(3)
    judge(Oracle(RIGHT, whole), [good, whole], [eager, whole])
    with pytest.raises(CaptureError, match="whole numbers"):
        judge(Oracle(RIGHT, whole), [good, whole + 1], [eager, whole])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["ours", "reference"])
def test_what_is_not_finite_in_one_of_them_is_no_pass(value: float, where: str) -> None:
    ours, right = off(0.2, every=2), RIGHT.clone()
    {"ours": ours, "reference": right}[where][0] = value
    with pytest.raises(CaptureError, match="float32"):
        judge(Oracle(right), [ours], [off(0.2)])


def test_what_is_infinite_in_all_of_them_hides_no_difference() -> None:
    good, bad, eager, right = off(0.2, every=2), off(0.9, every=2), off(0.2), RIGHT.clone()
    for tensor in (bad, eager, right):
        tensor[0] = math.inf
    with pytest.raises(CaptureError, match="isn't finite"):
        judge(Oracle(RIGHT, right), [good, bad], [off(0.2), eager])


def test_nan_in_all_of_them_is_no_difference() -> None:
    tensors = off(0.2, every=2), off(0.2), RIGHT.clone()
    for tensor in tensors:
        tensor[0] = math.nan
    ours, eager, right = tensors
    judge(Oracle(right), [ours], [eager])


def test_where_eager_mode_says_nothing_nothing_is_as_good() -> None:
    with pytest.raises(CaptureError, match=r"eager mode by 1.2e"):
        judge(Oracle(RIGHT), [off(1.0, every=2)], [off(1.2)])


@pytest.mark.parametrize(
    "reference",
    [(RIGHT.to(BF16),), (RIGHT, RIGHT), (), (RIGHT[:50],)],
    ids=["half", "more", "none", "shape"],
)
def test_a_reference_of_another_kind_is_none(reference: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(CaptureError, match=r"differs from eager mode by .* float32"):
        judge(Oracle(*reference), [off(0.2, every=2)], [off(0.2)])


def test_who_can_not_say_what_is_right_is_not_asked() -> None:
    with pytest.raises(CaptureError, match=r"on a probe$"):
        judge(object(), [off(0.2, every=2)], [off(0.2)])


def precisions() -> list[Any]:
    settings: list[Any] = [_precision(*place) for place in PLACES]
    for older in (torch.get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32):
        try:
            settings.append(older())
        except RuntimeError:  # the newer setting disagrees
            settings.append(None)
    return settings


@pytest.fixture(params=["default", "high", "medium", "newer", "generic"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """How exact products in float32 are, as a user may have set it."""
    if request.param in ("high", "medium"):
        torch.set_float32_matmul_precision(request.param)
    elif request.param == "newer":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    elif request.param == "generic":
        _set_precision("generic", "all", "tf32")
    yield request.param
    torch.set_float32_matmul_precision("highest")
    for place in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        _set_precision(*place, "none")


@pytest.mark.parametrize("fails", [False, True])
def test_float32_is_exact_meanwhile_and_as_it_was_afterwards(precision: str, fails: bool) -> None:
    def look() -> None:
        seen.append([_precision(*place) for place in PLACES])
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        if fails:
            raise ValueError("no such kernel")

    seen: list[list[str]] = []
    before, state = precisions(), torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"):
        with pytest.raises(CaptureError, match="no such kernel") if fails else nullcontext():
            judge(Oracle(RIGHT, inside=look), [off(0.2, every=2)], [off(0.2)])
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
    assert seen == [["ieee"] * len(PLACES)]
    assert precisions() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_what_follows_another_setting_still_follows_it() -> None:
    def follows() -> list[str]:
        _set_precision("generic", "all", "ieee")
        try:
            return [_precision(*place) for place in PLACES]
        finally:
            _set_precision("generic", "all", "none")

    before = follows()
    judge(Oracle(RIGHT), [off(0.2, every=2)], [off(0.2)])
    assert follows() == before


# ------------------------------------------------------------------ towers of transformers


def rough_tower(layout: str) -> nn.Module:
    """A tower in bfloat16 that loses bits behind its last norm."""
    tower = load_recipe(LAYOUTS[layout]).build_encoder(dtype=BF16)
    name, norm = [(n, m) for n, m in tower.named_modules() if isinstance(m, nn.LayerNorm)][-1]
    tower.set_submodule(name, nn.Sequential(norm, Rough(64.0)))
    return tower


def let_graphs_round_otherwise(encoder: TowerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    (rough,) = (m for m in encoder.tower.module.modules() if isinstance(m, Rough))
    run = encoder.preparation.run

    def other(forward: Any, **how: Any) -> Any:
        with rough.other_way(-0.5):  # nearer than eager mode: these are few numbers
            return run(forward, **how)

    monkeypatch.setattr(encoder.preparation, "run", other)


def encoder_of(tower: nn.Module) -> TowerEncoder:
    (found,) = find_towers(tower)
    return encoder_for(found)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("asked", [True, False])
def test_a_tower_that_is_as_right_runs_from_graphs(
    layout: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(rough_tower(layout))
    let_graphs_round_otherwise(encoder, monkeypatch)
    if not asked:
        monkeypatch.setattr("mmgraph.manager.judge.in_half", lambda _: False)
    manager = manager_of(encoder)
    manager.run(cast(call_of(layout)))
    stats = manager.stats()
    expected = (3, {}) if asked else (0, {Reason.CAPTURE_FAILED: 3})
    assert (stats.hits, stats.misses) == expected


@torch.no_grad()
@pytest.mark.parametrize("fails", [False, True])
def test_the_copy_of_an_attached_tower_is_gone_afterwards(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refers to itself: its method is bound to it, on the instance."""
    copies: list[weakref.ref[nn.Module]] = []

    def widened(module: nn.Module) -> nn.Module:
        twin = placement.widened(module)
        copies.append(weakref.ref(twin))
        assert "forward" in vars(twin)
        if fails:
            del vars(twin)["_modules"]["layernorm"]
        return twin

    tower = load_recipe(LAYOUTS["rows"]).build_encoder(dtype=BF16)
    call = cast(call_of("rows"))
    right = flatten(encoder_of(tower).embed_in_float32(**cast(call, torch.float32)))[0]
    eager = [off(0.2, t) for t in right]
    monkeypatch.setattr("mmgraph.encoders.tower.widened", widened)
    with attach(tower):
        judged = Judge(vars(tower)["forward"].encoder, "tower")
        gc.disable()
        try:
            with pytest.raises(CaptureError, match="layernorm") if fails else nullcontext():
                judged.check(call, [off(0.2, t, every=2) for t in right], eager, flat)
            (twin,) = copies
            assert twin() is None
        finally:
            gc.enable()
