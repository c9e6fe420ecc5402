"""docs/models.md is what the script makes of docs/models.json, and that lists every entry."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import models_table
from tests.registry.entries.all import ENTRIES
from tests.registry.entries.notes import NOTES
from tests.registry.record import DOCUMENT, HOW_TO_RECORD, documented

TABLE = DOCUMENT.with_suffix(".md")


def test_the_table_is_what_the_script_renders() -> None:
    assert TABLE.read_text(encoding="utf-8") == models_table.render(documented()), (
        "docs/models.md is out of date: python -m scripts.models_table"
    )


def test_every_section_lists_every_entry_and_no_other() -> None:
    names = {entry.name for entry in ENTRIES}
    sections = documented()
    assert any(name.startswith("trace/") for name in sections)
    for name, section in sections.items():
        assert section["entries"].keys() == names, f"{name} is out of date: {HOW_TO_RECORD}"


def test_what_has_no_graph_or_is_wrong_comes_with_a_reason() -> None:
    for section in documented().values():
        for name, run in section["entries"].items():
            assert run["graph"] in ("budgets", "exact", "eager", "absent"), name
            assert run.get("why") or run["graph"] not in ("exact", "eager"), name


def test_notes_are_about_entries() -> None:
    assert NOTES.keys() <= {entry.name for entry in ENTRIES}


def run(graph: str = "budgets", **more: Any) -> dict[str, Any]:
    return {"modality": "image", "inputs": "pixels", "class_name": "A", "graph": graph, **more}


def section(registered: int = 2, **entries: dict[str, Any]) -> dict[str, Any]:
    about = {"date": "2026-11-30", "device": "CPU", "versions": "torch 2"}
    return {**about, "registered": registered, "entries": entries}


def test_older_versions_are_named_where_they_differ() -> None:
    data = {
        "trace/transformers-5.9": section(a=run("exact", why="x"), b=run()),
        "trace/transformers-5.24": section(a=run(error=1e-6), b=run()),
        "h200/transformers-5.9": section(a=run(error=3e-3, eager_error=2e-3), b=run("absent")),
    }
    lines = models_table.render(data).splitlines()
    (a,) = [line for line in lines if line.startswith("| a |")]
    (b,) = [line for line in lines if line.startswith("| b |")]
    assert "| budgets, 1e-06; 5.9: exact, 0 [1](#why-no-budget) |" in a
    assert "| budgets, 0.003 / 0.002 | 5.9, 5.24 |" in a
    assert b.count("budgets") == 1
    assert "| absent |" in b


def test_a_platform_without_results_is_not_run_yet() -> None:
    text = models_table.render({"trace/transformers-5.24": section(a=run())})
    assert "| not run yet |" in text
    assert "on a GPU: not run yet" in text


def test_a_section_says_what_it_was_made_from_and_how_much_graphs_served() -> None:
    made = {**section(a=run(hit_rate=2 / 3)), "commit": "0123456789", "dirty": True}
    text = models_table.render({"trace/transformers-5.24": made})
    assert "CPU, torch 2, 0123456 with changes\n" in text
    assert "| budgets, 0, 67 % |" in text


def test_what_differs_is_shouted() -> None:
    data = {"trace/transformers-5.24": section(a=run(problems=["1 items: error 3e-1"]))}
    text = models_table.render(data)
    assert "**budgets, wrong** [1](#why-no-budget)" in text
    assert "1. 1 items: error 3e-1" in text


def test_a_run_of_all_replaces_its_section_and_one_of_some_adds_to_it() -> None:
    data = {"trace/transformers-5.24": section(a=run(), b=run())}
    some = {"trace/transformers-5.24": section(b=run("exact"))}
    every = {"trace/transformers-5.24": section(registered=1, b=run("exact"))}
    merged = models_table.merged(data, [some])["trace/transformers-5.24"]["entries"]
    assert (merged["a"]["graph"], merged["b"]["graph"]) == ("budgets", "exact")
    assert list(models_table.merged(data, [every])["trace/transformers-5.24"]["entries"]) == ["b"]


def test_files_of_several_processes_are_one_run() -> None:
    data = {"trace/transformers-5.24": section(a=run(), b=run(), gone=run())}
    files = [
        {"trace/transformers-5.24": section(a=run("exact"))},
        {"trace/transformers-5.24": section(b=run())},
    ]
    entries = models_table.merged(data, files)["trace/transformers-5.24"]["entries"]
    assert sorted(entries) == ["a", "b"]
    assert entries["a"]["graph"] == "exact"


def test_the_command_merges_renders_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_table, "DATA", tmp_path / "models.json")
    monkeypatch.setattr(models_table, "TABLE", tmp_path / "models.md")
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"trace/transformers-5.24": section(a=run())}))
    assert models_table.main(["--check"]) == 1
    assert models_table.main(["--merge", str(results)]) == 0
    assert models_table.main(["--check"]) == 0
    assert "up to date" in capsys.readouterr().out
    assert "| a |" in (tmp_path / "models.md").read_text()


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor comments nor docstrings."""
    source = path.read_text(encoding="utf-8")
    texts = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    prose = {n for text in texts for n in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and n not in prose
        for n, line in lines
    )


def test_the_code_for_all_encoders_is_what_others_need_for_four() -> None:
    """No model has code of its own; what makes graphs fast is in mmgraph/preparation."""
    folder = Path(__file__).parents[2] / "mmgraph" / "encoders"
    assert 500 < sum(map(lines_of_code, folder.glob("*.py"))) < 1500
