"""Norms of the blocks read their rows once, and nobody else's do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._inductor.virtualized import V

from mmgraph.preparation import blocks
from mmgraph.preparation.reductions import rows_at_once
from mmgraph.recipes import load_recipe


def kind() -> type:
    return type(V.choices)


def test_the_choice_is_there_within_the_block_only() -> None:
    before = kind()
    with rows_at_once():
        inside = kind()
    assert issubclass(inside, InductorChoices)
    assert inside is not before
    with pytest.raises(RuntimeError, match="inside"), rows_at_once():
        raise RuntimeError("inside")
    assert kind() is before


def test_who_has_chosen_otherwise_keeps_that() -> None:
    before = kind()
    with inductor_config.patch({"triton.persistent_reductions": False}), rows_at_once():
        assert kind() is before
    with inductor_config.patch({"inductor_choices_class": InductorChoices}), rows_at_once():
        assert kind() is before


def test_blocks_are_compiled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[type] = []

    def compiled(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kinds.append(kind())
            return forward(*args, **kwargs)

        return run

    monkeypatch.setattr(blocks.torch, "compile", compiled)
    before, tower = kind(), load_recipe("siglip:tiny").build_encoder(device="cpu")
    side = tower.config.image_size
    with torch.no_grad(), blocks.compiled_blocks(tower):
        tower(torch.randn(1, 3, side, side))
    assert kinds
    assert before not in kinds
    assert kind() is before


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("width", [1152, 1280, 4096])
def test_a_long_row_is_read_once(width: int) -> None:
    # A module: of a function that closes over it the width would be symbolic, too.
    norm = torch.nn.LayerNorm(width, device="cuda", dtype=torch.bfloat16)
    x, kernels = torch.randn(64, width, device="cuda", dtype=torch.bfloat16), []
    for context in (rows_at_once, fresh_cache):
        torch._dynamo.reset()
        with fresh_cache(), context():
            output, (code, *_) = run_and_get_code(torch.compile(norm.forward, dynamic=True), x)
        torch.testing.assert_close(output, norm(x), rtol=2e-2, atol=2e-2)
        kernels.append([kind for kind in ("triton_per_", "triton_red_") if kind in code])
    assert kernels == [["triton_per_"], ["triton_red_"]]


def test_the_caches_of_the_compiler_keep_such_code_apart() -> None:
    """Or somebody else's compile of the same operations would get it, and the other way round."""
    found = []

    def counted() -> int:
        return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])

    def add(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu()

    with fresh_cache():
        for context in (nullcontext, rows_at_once, nullcontext, rows_at_once):
            torch._dynamo.reset()
            before = counted()
            with context():
                torch.compile(add)(torch.ones(3))
            found.append(counted() - before)
    assert found == [0, 0, 1, 1]
