"""Warnings that are given once, and switches in the environment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from mmgraph import env
from mmgraph.log import WarnOnce, get_logger

FLAGS = [
    ("MMGRAPH_DEBUG", env.debug_enabled),
    ("MMGRAPH_ENABLE_CUDAGRAPH_GC", env.gc_during_capture),
]


@pytest.mark.parametrize(("name", "read"), FLAGS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, False),  # not set
        ("", False),  # set to nothing
        ("0", False),
        ("false", False),
        ("2", False),  # only what is known to mean yes does
        ("1", True),
        (" 1 ", True),  # shells and compose files leave blanks
        ("true", True),
        ("YES", True),
        ("On", True),
    ],
)
def test_flags_are_read_on_every_use(
    name: str,
    read: Callable[[], bool],
    value: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for other, _ in FLAGS:
        monkeypatch.delenv(other, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert read() is expected
    assert [other() for flag, other in FLAGS if flag != name] == [False]
    monkeypatch.delenv(name, raising=False)
    assert not read()


def test_a_topic_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = WarnOnce(get_logger("mmgraph.test"))
    for topic in ("a", "a", "b", "a"):
        warn(topic, "topic %s costs %d %%", topic, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "topic a costs 5 %",
        "topic b costs 5 %",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_owners_warn_on_their_own(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        WarnOnce(get_logger("mmgraph.test"))("a", "once")
    assert len(caplog.records) == 2


def test_threads_warn_once_between_them(caplog: pytest.LogCaptureFixture) -> None:
    warn, start = WarnOnce(get_logger("mmgraph.test")), threading.Barrier(8)

    def work() -> None:
        start.wait()
        warn("a", "once")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


def test_a_logger_is_the_standard_one_of_its_name() -> None:
    assert get_logger("mmgraph.x") is logging.getLogger("mmgraph.x")
