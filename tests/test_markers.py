"""Which tests a machine with few devices leaves out, and when it says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


class Item:
    """A test, as far as its markers go."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers

    def get_closest_marker(self, name: str) -> object | None:
        return name if name in self.markers else None


PLAIN, ONE, TWO = Item(), Item("gpu"), Item("gpu", "multi_gpu")


def selected(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, items: list[Item], markexpr: str = ""
) -> tuple[list[Item], list[Item]]:
    """The tests that are left of `items`, and those that were deselected."""
    monkeypatch.setattr(conftest, "_num_devices", lambda: num_devices)
    items, left_out = list(items), list[Item]()
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=markexpr), hook=hook)
    tests: Any = items
    conftest.pytest_collection_modifyitems(config, tests)
    return items, left_out


@pytest.mark.parametrize(
    ("num_devices", "left"),
    [(0, [PLAIN]), (1, [PLAIN, ONE]), (2, [PLAIN, ONE, TWO]), (8, [PLAIN, ONE, TWO])],
)
def test_tests_that_need_more_devices_are_deselected(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, left: list[Item]
) -> None:
    items, left_out = selected(monkeypatch, num_devices, [PLAIN, ONE, TWO])
    assert items == left
    assert {*items, *left_out} == {PLAIN, ONE, TWO}
    assert len(items) + len(left_out) == 3


@pytest.mark.parametrize(
    ("markexpr", "num_devices", "fails"),
    [
        ("gpu", 0, True),
        ("gpu", 1, False),  # those for two are left out
        ("multi_gpu", 0, True),
        ("multi_gpu", 1, True),
        ("multi_gpu", 2, False),
        ("gpu and multi_gpu", 1, True),
        ("not slow", 0, False),
    ],
)
def test_to_ask_for_them_by_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, markexpr: str, num_devices: int, fails: bool
) -> None:
    asked = [TWO] if "multi_gpu" in markexpr else [ONE, TWO]
    if fails:
        with pytest.raises(pytest.UsageError, match=r"asks for \d tests marked (multi_)?gpu"):
            selected(monkeypatch, num_devices, asked, markexpr)
    else:
        selected(monkeypatch, num_devices, asked, markexpr)
