from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mmgraph import cli
from mmgraph.bench import accuracy
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.results import DEFAULT, EAGER, EXACT, HAND_MADE, METADATA, Report
from mmgraph.bench.run import run

TINY = ("bench", "--model", "clip:tiny", "qwen2_5_vl:tiny", "--quick", "-n", "2")


def test_a_tiny_run_measures_matches_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main([*TINY, "--device", "cpu", "--out", str(out)]) == 0
    report = Report.from_json((out / "bench.json").read_text(encoding="utf-8"))
    assert report.ok
    assert (report.repeats, report.dtype) == (2, "float32")
    assert report.command == f"mmgraph {' '.join(TINY)} --device cpu --out {out}"
    assert [(row.model, row.size, row.tokens) for row in report.rows] == [
        ("clip:tiny", "1", 16),
        ("clip:tiny", "2", 32),
        ("qwen2_5_vl:tiny", "56", 16),
        ("qwen2_5_vl:tiny", "112x2", 128),
    ]
    clip, qwen = report.rows[1], report.rows[3]
    assert list(clip.timings) == [EAGER, EXACT, DEFAULT]
    assert list(qwen.timings) == [EAGER, METADATA, EXACT, DEFAULT]
    assert all(timing.n == 2 and timing.min_ms > 0 for timing in qwen.timings.values())
    assert (clip.served[EXACT].budgets, clip.served[EXACT].padding) == ((32,), 0)
    assert (qwen.served[EXACT].budgets, qwen.served[EXACT].padding) == ((128,), 0)
    assert (qwen.served[DEFAULT].budgets, qwen.served[DEFAULT].padding) == ((256,), 128)
    assert all(error <= 1e-5 for row in report.rows for error in row.errors.values())
    printed = capsys.readouterr()
    assert (out / "bench.md").read_text(encoding="utf-8") in printed.out
    assert len(printed.err.splitlines()) == len(report.rows)
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_mismatch_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "_MAX_FLOAT32_ERROR", -1.0)
    command = ["bench", "--model", "clip:tiny", "--batch", "1", "-n", "1", "--device", "cpu"]
    assert cli.main(command) == 1
    assert "NO MATCH" in capsys.readouterr().out


def test_without_matplotlib_everything_but_the_plot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["bench", "--model", "clip:tiny", "--batch", "1", "-n", "1", "--warmup", "0"]
    assert cli.main([*command, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
    assert "mmgraph[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "448x"], "SIZExCOUNT"),
        (["--image", "448", "0x2"], "SIZExCOUNT"),
        (["--batch", "0"], "number from 1"),
        (["-n", "many"], "number from 1"),
        (["--warmup", "-1"], "argument --warmup"),
        (["--dtype", "int8"], "invalid choice"),
        (["--model"], "expected at least one argument"),
    ],
)
def test_bad_values_are_usage_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_is_named_with_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--model", "clip:tiny", "qwen2.5-vl-8b"]) == 2
    assert "did you mean 'qwen2.5-vl-7b'" in capsys.readouterr().err


def test_an_output_folder_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["bench", "--device", "cpu", "--out", str(file)]) == 2
    assert f"--out {file}" in capsys.readouterr().err


def test_cuda_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cuda = _resolve([])
    assert (on_cuda.device.type, on_cuda.dtype, on_cuda.repeats) == ("cuda", torch.bfloat16, 30)
    assert on_cuda.recipes[0].name == "qwen2.5-vl-7b"
    assert [str(image) for image in on_cuda.images[-2:]] == ["448x8", "448x16"]
    on_cpu = _resolve(["--device", "cpu", "--batch", "3"])
    assert (on_cpu.dtype, on_cpu.batches) == (torch.float32, (3,))
    assert {recipe.name.partition(":")[2] for recipe in on_cpu.recipes} == {"tiny"}
    assert len(_resolve(["--quick"]).images) < len(on_cuda.images)


def test_the_bench_needs_no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmgraph.demo", None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "--help"])
    assert exit_.value.code == 0


@pytest.mark.gpu
def test_on_a_gpu_there_is_a_graph_made_by_hand() -> None:
    # Large enough that the error of an output is more than noise.
    sizes = ("--image", "224", "224x4", "--batch", "16")
    report = run(_resolve([*TINY[1:], *sizes, "--device", "cuda"]))
    assert report.environment.gpu
    for row in report.rows:
        assert HAND_MADE in row.timings
        assert row.ok, row
        assert row.errors[HAND_MADE] <= 1.10 * row.errors[EAGER], row
    assert Report.from_json(report.to_json()) == report


def _resolve(arguments: list[str]) -> BenchOptions:
    return BenchOptions.resolve(cli._parser("bench").parse_args(["bench", *arguments]))
