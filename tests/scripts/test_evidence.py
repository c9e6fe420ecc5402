"""The parts of the evidence are run within their limits, and how each ended is written down."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmgraph.bench.options import add_arguments
from mmgraph.recipes import list_recipes
from scripts import evidence, run_notebook
from scripts.evidence import PARTS, Part, parts, run

ROOT = Path(__file__).parents[2]
NOTEBOOK = """{"cells": [{"cell_type": "code", "execution_count": null, "id": "a", "metadata": {},
"outputs": [], "source": ["import mmgraph\\n", "print(mmgraph.__name__, 6 * 7)"]}%s],
"metadata": {}, "nbformat": 4, "nbformat_minor": 5}"""
FAILING = """, {"cell_type": "code", "execution_count": null, "id": "b", "metadata": {},
"outputs": [], "source": ["raise KeyError('b')"]}"""


def says(text: str, code: int = 0) -> Part:
    return Part((sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"), 60)


def test_how_each_part_ended_is_written(tmp_path: Path) -> None:
    chosen = {"good": says("3 passed"), "bad": says("1 failed", code=1), "good2": says("done")}
    good, bad, good2 = run(chosen, tmp_path, seconds=100)
    assert (good.ok, good.last, bad.ok, bad.code, bad.last) == (
        True,
        "3 passed",
        False,
        1,
        "1 failed",
    )
    assert good2.ok  # what comes after a part that failed is run as well
    assert (tmp_path / "bad.txt").read_text() == "1 failed\n"
    written = json.loads((tmp_path / "evidence.json").read_text())
    assert [part["part"] for part in written["parts"]] == ["good", "bad", "good2"]
    assert written["environment"]["versions"]["torch"]


def test_a_part_that_takes_too_long_is_ended_and_what_it_said_is_kept(tmp_path: Path) -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    slow = Part((sys.executable, "-c", code), 2.0)
    (result,) = run_with_short_limits({"slow": slow}, tmp_path)
    assert (result.ok, result.code) == (False, None)
    assert (tmp_path / "slow.txt").read_text().startswith("begun\nended after")


def run_with_short_limits(chosen: dict[str, Part], out: Path) -> list[evidence.Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "_LEAST", 0.0)
        return run(chosen, out, seconds=100)


def test_a_part_that_the_time_does_not_reach_is_not_begun(tmp_path: Path) -> None:
    clock = iter([0.0, 10.0, 90.0])
    first, second = run(
        {"a": says("a"), "b": says("b")}, tmp_path, seconds=100, clock=lambda: next(clock)
    )
    assert first.ok
    assert (second.code, second.last) == (None, "no time was left for it")
    assert not (tmp_path / "b.txt").exists()


def test_commands_name_files_that_are_there(tmp_path: Path) -> None:
    known = parts(tmp_path, workers=4)
    assert tuple(known) == PARTS
    for part in known.values():
        for word in part.command:
            if word.startswith(("tests", "notebooks")):
                assert (ROOT / word).exists(), word
            if word.startswith("scripts."):
                assert (ROOT / word.replace(".", "/")).with_suffix(".py").exists(), word


def test_the_bench_takes_what_it_is_given(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [p.command for p in parts(tmp_path, 1).values() if "bench" in p.command]
    assert len(given) == 6
    for command in given:
        options = parser.parse_args(command[command.index("bench") + 1 :])
        assert set(options.model or ()) <= set(list_recipes())
        assert options.out is not None


def test_no_two_parts_write_the_same_page_of_traces(tmp_path: Path) -> None:
    traces = [p.command for p in parts(tmp_path, 1).values() if "scripts.bench_traces" in p.command]
    pages = {(c[c.index("--out") + 1], c[c.index("--model") + 1]) for c in traces}
    assert len(pages) == len(traces) == 2


def test_the_command_runs_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "parts", lambda out, workers: {n: says(n) for n in PARTS})
    assert evidence.main(["--out", str(tmp_path), "demo", "soak"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()] == [["demo", "ok"], ["soak", "ok"]]
    with pytest.raises(SystemExit):
        evidence.main(["--out", str(tmp_path), "nothing"])


def test_a_notebook_is_written_with_its_outputs(tmp_path: Path) -> None:
    source, target = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    source.write_text(NOTEBOOK % "")
    assert run_notebook.main([str(source), str(target)]) == 0
    (cell,) = json.loads(target.read_text())["cells"]
    assert cell["outputs"][0]["text"] == ["mmgraph 42\n"]


def test_a_notebook_that_fails_is_written_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(NOTEBOOK % FAILING)
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.run_notebook", str(path), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "KeyError" in ran.stderr
    first, second = json.loads(path.read_text())["cells"]
    assert first["outputs"][0]["text"] == ["mmgraph 42\n"]
    assert second["outputs"][0]["ename"] == "KeyError"
