from __future__ import annotations

from dataclasses import replace

from mmgraph.bench.names import (
    BOUND,
    COMPILE,
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    LABELS,
    POWER_OF_TWO,
)
from mmgraph.bench.records import Served
from mmgraph.bench.table import render_markdown, summarize
from tests.bench.samples import detailed_row, report, row, rows_tower_row, timing


def table_of(text: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, without the rule."""
    section = text.split(f"# {title}\n")[1].split("\n#")[0]
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


MODEL = "qwen2.5-vl-7b"


def test_a_report_that_was_cut_off_says_so() -> None:
    whole = report(row())
    assert "not complete" not in render_markdown(whole)
    assert "not complete" in render_markdown(replace(whole, complete=False))


def test_a_bound_is_in_the_main_table() -> None:
    header, first, second = table_of(render_markdown(report(detailed_row(), row())), MODEL)
    assert first[header.index("practical bound")] == "8.00 (16.0)"
    assert first[header.index("x bound")] == "1.25"
    assert [second[header.index(name)] for name in ("practical bound", "x bound")] == ["-", "-"]


def test_each_variant_has_a_line_of_its_own() -> None:
    text = render_markdown(report(detailed_row(), detailed_row(size="224")))
    header, *lines = table_of(text, f"{MODEL}: variants")
    assert [line[:2] for line in lines[:6]] == [
        ["448x4", LABELS[name]] for name in (EAGER, HAND_MADE, POWER_OF_TWO, EXACT, DEFAULT, BOUND)
    ]
    assert lines[6][0] == "224"
    assert dict(zip(header, lines[3], strict=True)) == {
        "size": "448x4",
        "variant": "mmgraph, exact budget",
        "ms": "10.0",
        "x bound": "1.25",
        "TFLOP/s": "400",
        "calls/s": "100",
        "items/s": "400",
        "host µs": "150",
        "first call s": "9.00",
        "capture s": "8.50",
        "compile s": "7.25",
        "MiB": "123",
    }
    assert lines[0][-4:] == ["-"] * 4


def test_kernels_are_shown_by_share_before_and_after() -> None:
    header, eager, exact = table_of(render_markdown(report(detailed_row())), f"{MODEL}: kernels")
    assert header == [
        "size",
        "variant",
        "kernel ms",
        "attention",
        "matmul",
        "norm",
        "copy",
        "other",
    ]
    assert eager[1:] == ["eager", "10.0", "20 %", "60 %", "10 %", "0 %", "10 %"]
    assert exact[1:] == ["mmgraph, exact budget", "8.00", "25 %", "75 %", "0 %", "0 %", "0 %"]


def test_what_is_missing_is_told_once_for_all_sizes_that_it_holds_for() -> None:
    failed = {COMPILE: "OutOfMemoryError: 80 GiB"}
    rows = detailed_row(), detailed_row(size="224"), detailed_row(size="8", absent=failed)
    text = render_markdown(report(*rows))
    assert "- no torch.compile of 448x4, 224: Unsupported: a call of tolist\n" in text
    assert "- no torch.compile of 8: OutOfMemoryError: 80 GiB\n" in text


def test_the_attention_in_the_bound_is_told_fastest_first() -> None:
    assert (
        "- 448x4: 32 x attention over 4 x 1024 rows, 16 heads of 80 "
        "(us: dense, cuDNN 44.0; segments, flash 66.0)\n"
    ) in render_markdown(report(detailed_row()))


def test_a_variant_that_only_some_sizes_have_leaves_a_gap() -> None:
    compiled = detailed_row(size="224", absent={})
    compiled = replace(compiled, timings={**compiled.timings, COMPILE: timing(30.0)})
    header, first, second = table_of(render_markdown(report(detailed_row(), compiled)), MODEL)
    column = header.index("torch.compile")
    assert [first[column], second[column]] == ["-", "30.0 (60.0)"]


def test_rows_from_before_there_were_details_have_none() -> None:
    text = render_markdown(report(row()))
    assert ": variants" not in text
    assert ": kernels" not in text
