"""The error tree, and the refusal that is no error."""

from __future__ import annotations

import pytest

from mmgraph import EncoderBatch, EncoderItemSpec, Reason, Refusal, errors


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("MMGraphError", (Exception,)),  # the root
        ("ConfigError", (errors.MMGraphError, ValueError)),  # what a caller gave is wrong
        ("InvalidInputError", (errors.MMGraphError, ValueError)),  # so are the inputs of a call
        ("UnsupportedModelError", (errors.MMGraphError,)),  # nothing to capture
        ("CaptureError", (errors.MMGraphError,)),  # recording failed
        ("ReplayError", (errors.MMGraphError,)),  # a recording can't be used
    ],
)
def test_the_error_tree(name: str, bases: tuple[type, ...]) -> None:
    assert getattr(errors, name).__bases__ == bases


def test_every_error_is_exported_and_caught_as_one() -> None:
    assert set(errors.__all__) == {n for n in vars(errors) if n.endswith("Error")}
    for name in errors.__all__:
        with pytest.raises(errors.MMGraphError, match="text"):
            raise getattr(errors, name)("text")


def test_a_refusal_is_no_mmgraph_error() -> None:
    assert not issubclass(Refusal, errors.MMGraphError)


def test_a_refusal_says_its_reason_unless_it_has_a_detail() -> None:
    assert str(Refusal(Reason.GRAD)) == "gradients are required"
    assert str(Refusal(Reason.UNSUPPORTED_CALL, detail="x is odd")) == "x is odd"


@pytest.mark.parametrize(
    ("batch", "num_items"),
    [
        (None, 1),  # a call that can't be read counts as one
        (EncoderBatch(()), 0),  # no items
        (EncoderBatch((EncoderItemSpec(4),) * 3), 3),  # its items
    ],
)
def test_a_refusal_counts_the_items_it_knows(batch: EncoderBatch | None, num_items: int) -> None:
    assert Refusal(Reason.GRAD, batch).num_items == num_items


def test_no_reason_is_another_name_for_one() -> None:
    assert list(Reason.__members__) == [reason.name for reason in Reason]
