"""``mmgraph plan``: what it reads, what it prints, and that its output is a config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmgraph import EncoderStats, GraphConfig, cli
from mmgraph.plan.trace import Trace, read_trace
from mmgraph.policy import expect, fit

CALLS = {256: 90, 1024: 50, 1040: 10, 5000: 1}
TODAY = (512, 2048, 8192)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def statistics(folder: Path, **more: Any) -> Path:
    path = folder / "stats.json"
    EncoderStats(call_sizes=CALLS, item_sizes=CALLS, budgets=TODAY, **more).save(path)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "256\n1024\n256\n",  # one a line
        "256, 1024;256",  # on one line
        "tokens\r\n256\r\n1024\r\n256\r\n",  # a CSV of one column
        "[256, 1024, 256]",  # JSON
        '{"256": 2, "1024": 1}',  # JSON, counted
        "\ufeff256\n\n1024\n 256",  # a mark of the byte order, empty lines
    ],
)
def test_lists_of_sizes_are_read(tmp_path: Path, text: str) -> None:
    sizes = {256: 2, 1024: 1}
    assert read_trace(write(tmp_path, text)) == Trace(sizes, sizes)


def test_statistics_are_read_with_their_budgets(tmp_path: Path) -> None:
    assert read_trace(statistics(tmp_path, calls=151)) == Trace(CALLS, CALLS, TODAY)


def test_the_table_compares_todays_ladder_with_the_fitted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(statistics(tmp_path)), "--budgets", "3"]) == 0
    today, fitted = expect(CALLS, TODAY), expect(CALLS, fit(CALLS, 3))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "151 replays of 4 sizes, 256 to 5000 tokens"
    assert lines[2].split() == ["ladder", "budgets", "padding", "cost", "above", "the", "largest"]
    padding = [f"{100 * result.padding:.1f}" for result in (today, fitted)]
    assert lines[3].split() == ["today", "3", padding[0], "%", "1.000", "x", "0.0", "%"]
    ratio = f"{fitted.cost / today.cost:.3f}"
    assert lines[4].split() == ["fitted", "3", padding[1], "%", ratio, "x", "0.0", "%"]
    assert lines[6:] == ["today: 512, 2048, 8192", "fitted: 256, 1040, 5000"]
    assert fitted.cost < 0.8 * today.cost


def test_a_list_is_compared_with_the_default_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path, "64\n" * 9 + "68\n1024\n")
    assert cli.main(["plan", str(trace), "--granularity", "4"]) == 0
    printed = capsys.readouterr().out
    assert "default: 64, 80, " in printed
    assert printed.endswith("fitted: 64, 68, 1024\n")


def test_above_the_largest_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, "100 100 100 1000")
    assert cli.main(["plan", str(trace), "--largest", "500"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].endswith("25.0 %")
    assert lines[-1] == "fitted: 100"


def test_calls_above_every_item_are_divided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stats.json"
    EncoderStats(call_sizes={2500: 10}, item_sizes={500: 50}, budgets=(1000,)).save(path)
    assert cli.main(["plan", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "30 replays of 2 sizes, 500 to 1000 tokens"
    assert lines[-1] == "fitted: 500, 1000"


def test_costs_of_ones_own_change_the_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(write(tmp_path, "100\n" * 99 + "1000")), "--budgets", "1"]
    fitted = []
    for overhead in ("100000", "1000"):
        assert cli.main([*command, "--eager-overhead", overhead]) == 0
        fitted.append(capsys.readouterr().out.splitlines()[-1])
    assert fitted == ["fitted: 1000", "fitted: 100"]


def test_the_output_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "budgets.json"
    command = ["plan", str(statistics(tmp_path)), "--budgets", "3", "--out", str(out)]
    assert cli.main(command) == 0
    assert GraphConfig.from_file(out) == GraphConfig(token_budgets=(256, 1040, 5000))
    assert capsys.readouterr().out.endswith(f"GraphConfig.from_file({str(out)!r}) takes them.\n")


def test_tiny_budgets_are_a_config_too(tmp_path: Path) -> None:
    out = tmp_path / "budgets.json"
    assert cli.main(["plan", str(write(tmp_path, "1 2 3")), "--out", str(out)]) == 0
    assert GraphConfig.from_file(out) == GraphConfig(token_budgets=(1, 2, 3), max_items=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sizes of calls"),
        ("tokens\n", "holds no sizes of calls"),
        ("[]", "holds no sizes of calls"),
        ('{"call_sizes": {}}', "holds no sizes of calls"),
        ("256\n0\n", "line 2: a size must be a positive integer, got '0'"),
        ("256\nmany\n", "line 2: a size must be a positive integer, got 'many'"),
        ("256\n1.5\n", "line 2: a size must be a positive integer, got '1.5'"),
        ("-256", "line 1: a size must be a positive integer, got '-256'"),
        ("time,tokens\n1,256\n", "line 2 has 2 columns: give one of sizes only"),
        ("[256, true]", "a size must be a positive integer, got True"),
        ("[256, 1.5]", "a size must be a positive integer, got 1.5"),
        ("[256,", "the file is no JSON"),
        ('{"hits": 3}', "a size in the file must be a positive integer, got 'hits'"),
        ('{"256": 0}', "the count of 256 must be a positive integer, got 0"),
        ('{"call_sizes": [256]}', "call_sizes must be a JSON object of sizes and counts"),
        ('{"call_sizes": {"256": 1}, "item_sizes": 3}', "item_sizes must be a JSON object"),
        ('{"call_sizes": {"256": 1}, "budgets": 3}', "budgets must be a list, got 3"),
        ('{"call_sizes": {"256": 1}, "budgets": [0]}', "a budget must be a positive integer"),
    ],
)
def test_bad_traces_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    trace = write(tmp_path, text)
    assert cli.main(["plan", str(trace)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mmgraph plan: {trace}: ")
    assert message in error


def test_files_that_are_not_there_or_no_text_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(tmp_path / "none")]) == 2
    assert "none: the file can't be read (No such file" in capsys.readouterr().err
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    assert cli.main(["plan", str(tmp_path / "image")]) == 2
    assert "image: the file is no text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--largest", "10"], "no budget of up to 10 tokens is worth a graph"),
        (["--largest", "10", "--granularity", "16"], "--largest 10 holds no multiple of"),
        (["--out", "/dev/null/file"], "--out /dev/null/file: the file can't be written"),
    ],
)
def test_what_can_not_be_done_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["plan", str(write(tmp_path, "100 200")), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: TRACE"),
        (["t", "--budgets", "0"], "expected a number from 1, got '0'"),
        (["t", "--granularity", "x"], "expected a number from 0, got 'x'"),
        (["t", "--overhead", "-1"], "argument --overhead"),
    ],
)
def test_bad_options_are_usage_errors(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["plan", *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from mmgraph import cli; "
        f"sys.exit(cli.main(['plan', {str(statistics(tmp_path))!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fitted: 256, 1024, 1040, 5000" in done.stdout
    assert json.loads((tmp_path / "stats.json").read_text())["budgets"] == list(TODAY)
