from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmgraph.bench.accuracy import output_error
from mmgraph.bench.compiled import MODES, open_compiled
from mmgraph.bench.names import BASELINES, COMPILE, EXACT
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.run import run
from mmgraph.bench.sizes import ImageSize
from mmgraph.bench.subject import open_subject
from mmgraph.bench.table import render_markdown
from mmgraph.recipes import load_recipe

CPU = torch.device("cpu")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Modes that the compiler is asked for; it traces, and generates no code."""
    asked: list[str | None] = []
    compile_ = torch.compile

    def traced(module: Any, *, mode: str | None, dynamic: bool) -> Any:
        asked.append(mode)
        return compile_(module, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.utils.counters.clear()
    yield asked
    torch._dynamo.utils.counters.clear()  # other tests count, too


@pytest.mark.parametrize("name", ["clip:tiny", "qwen2_5_vl:tiny"])
def test_compiled_towers_give_what_eager_mode_gives(name: str, modes: list[str | None]) -> None:
    with torch.no_grad(), open_subject(load_recipe(name), CPU, torch.float32) as subject:
        size = subject.sizes([ImageSize(96, 2)], [2])[0]
        inputs = subject.inputs(size)
        with open_compiled(subject, size, inputs, COMPILE) as (call, cost):
            inputs.renew(7)
            assert output_error(call(), inputs.call_eager(subject.tower)) < 1e-5
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # in one piece
    assert cost.compile_s == cost.first_call_s > 0
    assert modes == [None]


def test_each_baseline_of_the_compiler_has_its_mode(modes: list[str | None]) -> None:
    report = run(_options(tuple(MODES)))
    (row,) = report.rows
    assert modes == [None, "reduce-overhead", "max-autotune"]
    assert MODES.keys() <= row.timings.keys()
    assert all(row.errors[name] <= 1e-5 for name in MODES)
    assert all(row.costs[name].compile_s for name in MODES)


def test_a_compiler_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, mode: str | None, **__: Any) -> Any:
        raise RuntimeError(f"no {mode} here\nand a long story")

    monkeypatch.setattr(torch, "compile", fails)
    report = run(_options(tuple(MODES)))
    (row,) = report.rows
    assert row.ok
    assert not MODES.keys() & row.timings.keys()
    assert row.absent[BASELINES["compile-max-autotune"]] == "RuntimeError: no max-autotune here"
    assert "no torch.compile max-autotune of 2: RuntimeError: no max-autotune here\n" in (
        render_markdown(report)
    )


def test_compiled_code_that_breaks_on_the_way_spoils_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Breaks(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > 3:  # the first three come before the timing
                raise RuntimeError("broken")
            return self.module(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", lambda module, **_: Breaks(module))
    (row,) = run(_options((COMPILE,))).rows
    assert row.match
    assert row.errors[EXACT] <= 1e-5
    assert row.absent == {COMPILE: "RuntimeError: broken"}


def _options(baselines: tuple[str, ...]) -> BenchOptions:
    return BenchOptions(
        device=CPU,
        dtype=torch.float32,
        recipes=(load_recipe("clip:tiny"),),
        images=(),
        batches=(2,),
        repeats=1,
        warmup=0,
        baselines=baselines,
    )
