from __future__ import annotations

from mmgraph.bench.results import DEFAULT, EXACT, Served
from mmgraph.bench.table import render_markdown, summarize
from tests.bench.samples import report, row, rows_tower_row


def table_of(text: str, model: str) -> list[list[str]]:
    """Cells of a model's table, without the rule."""
    section = text.split(f"## {model}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def test_the_head_says_where_the_numbers_come_from() -> None:
    text = render_markdown(report(row()))
    for fact in (
        "Some GPU (driver 580.1), 16 CPUs (Some CPU)",
        "torch 2.11.0, transformers 5.17.0",
        "commit 0123456789ab with uncommitted changes",
        "bfloat16, N = 30 after 2 of warm-up",
        "`mmgraph bench --quick`",
    ):
        assert fact in text


def test_a_row_shows_times_budget_overhead_and_errors() -> None:
    header, cells = table_of(render_markdown(report(row())), "qwen2.5-vl-7b")
    assert dict(zip(header, cells, strict=True)) == {
        "size": "448x4",
        "tokens": "4096",
        "eager": "40.0 (80.0)",
        "eager+metadata": "30.0 (60.0)",
        "hand-made graph": "9.90 (19.8)",
        "mmgraph, exact budget": "10.0 (20.0)",
        "mmgraph, default budgets": "12.0 (24.0)",
        "default budget": "5120, 20 % padding",
        "speed-up": "4.00x",
        "over hand-made": "+0.10 ms, +1.0 %",
        "host µs": "150",
        "errors": "1.2e-02 / 1.2e-02 / 1.2e-02",
        "match": "match",
    }


def test_models_get_tables_with_the_variants_that_they_have() -> None:
    text = render_markdown(report(row(), rows_tower_row(), row(size="224")))
    assert [cells[0] for cells in table_of(text, "qwen2.5-vl-7b")] == ["size", "448x4", "224"]
    header, cells = table_of(text, "clip-l-336")
    assert "hand-made graph" not in header
    assert "eager+metadata" not in header
    assert cells[header.index("over hand-made")] == "-"


def test_trouble_is_seen() -> None:
    text = render_markdown(report(row(exact_ms=11.0), row(match=False), row(exact_eager=4)))
    _, slow, wrong, eager = table_of(text, "qwen2.5-vl-7b")
    assert slow[-4] == "+1.10 ms, +11.1 % !"
    assert [wrong[-1], eager[-1]] == ["NO MATCH", "NOT REPLAYED"]


def test_what_default_budgets_did_is_told() -> None:
    exact = Served(budgets=(4096,), padding=0, eager=0)
    cases = {
        "eager": Served(budgets=(), padding=0, eager=4),
        "2048+4096, 0 % padding, 1 eager": Served(budgets=(2048, 4096), padding=0, eager=1),
    }
    for expected, served in cases.items():
        text = render_markdown(report(row(served={EXACT: exact, DEFAULT: served})))
        header, cells = table_of(text, "qwen2.5-vl-7b")
        assert cells[header.index("default budget")] == expected


def test_a_summary_is_one_line() -> None:
    assert summarize(row()) == (
        "qwen2.5-vl-7b 448x4: eager 40.0; eager+metadata 30.0; hand-made graph 9.90; "
        "mmgraph, exact budget 10.0; mmgraph, default budgets 12.0 ms; match"
    )
