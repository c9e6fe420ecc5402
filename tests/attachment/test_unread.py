"""Arguments that a forward never looks at are told from those that it reads in any way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mmgraph
from mmgraph.attachment.unread import unread_parameters
from mmgraph.recipes import load_recipe


def passed_on(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    return wrapper


class Unread(nn.Module):
    @passed_on
    def forward(self, x: Any, mask: Any = None, *, size: Any = None, **kwargs: Any) -> Any:
        return x


class Consulted(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x if mask is None else -x


class Enclosed(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return [row for row in x if (lambda: mask)() is None]


class Changed(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        mask = mask or 1
        return x


class Replaced(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        mask = 1  # what was given is gone, but telling that would take more than a look
        return x * mask


class AllAtOnce(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return len(locals())


class Paired(nn.Module):
    """Newer interpreters store and load two variables in one instruction."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        a = x
        b = mask
        a, b = b, a
        return a


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Unread, {"mask", "size"}),
        (Consulted, set()),
        (Enclosed, set()),
        (Changed, set()),
        (Replaced, set()),
        (AllAtOnce, set()),
        (Paired, set()),
    ],
)
def test_only_what_is_never_read(kind: type[nn.Module], expected: set[str]) -> None:
    assert unread_parameters(kind(), "forward") == expected


def test_a_forward_of_the_users_own_may_read_anything() -> None:
    module = Unread()
    module.forward = lambda x, mask=None: mask  # type: ignore[method-assign]
    assert unread_parameters(module, "forward") == frozenset()


@torch.no_grad()
def test_an_unread_mask_of_any_shape_is_no_part_of_the_call() -> None:
    encoder = load_recipe("whisper:tiny").build_encoder()
    assert unread_parameters(encoder, "forward") == {"attention_mask"}
    features = torch.randn(2, 128, 128)
    eager = encoder(features).last_hidden_state
    with mmgraph.attach(encoder) as handle:
        for mask in (None, torch.ones(2, 300), torch.ones(3, 500), torch.zeros(2, 128).long()):
            output = encoder(features, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(output, eager, rtol=1e-5, atol=1e-5)
        assert handle.stats().hits == 8
        assert len(handle.stats().graphs) == 1
