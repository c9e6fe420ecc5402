from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from mmgraph import cli
from mmgraph.bench import accuracy
from mmgraph.bench.names import (
    BASELINES,
    BOUND,
    DEFAULT,
    EAGER,
    EXACT,
    HAND_MADE,
    METADATA,
    POWER_OF_TWO,
)
from mmgraph.bench.options import BenchOptions
from mmgraph.bench.results import Report
from mmgraph.bench.run import run

variants_module: Any = import_module("mmgraph.bench.variants")
run_module: Any = import_module("mmgraph.bench.run")  # the package has a function of that name
TINY = ("bench", "--model", "clip:tiny", "qwen2_5_vl:tiny", "--quick", "-n", "2")


def test_a_tiny_run_measures_matches_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main([*TINY, "--device", "cpu", "--out", str(out)]) == 0
    report = Report.from_json((out / "bench.json").read_text(encoding="utf-8"))
    assert report.ok
    assert report.complete
    assert (report.repeats, report.dtype) == (2, "float32")
    assert report.command == f"mmgraph {' '.join(TINY)} --device cpu --out {out}"
    assert [(row.model, row.size, row.tokens) for row in report.rows] == [
        ("clip:tiny", "1", 16),
        ("clip:tiny", "2", 32),
        ("qwen2_5_vl:tiny", "56", 16),
        ("qwen2_5_vl:tiny", "112x2", 128),
    ]
    clip, qwen = report.rows[1], report.rows[3]
    assert list(clip.timings) == [EAGER, EXACT, DEFAULT, BOUND]
    assert list(qwen.timings) == [EAGER, METADATA, EXACT, DEFAULT, BOUND]
    for row in report.rows:
        assert row.throughput.keys() == row.timings.keys()
        assert row.errors.keys() == row.timings.keys() - {BOUND}
        assert row.bound is not None
        assert row.bound.flops > 0
        assert row.absent == {}
        for name in (EXACT, DEFAULT):
            cost = row.costs[name]
            assert cost.capture_s is not None
            assert 0 < cost.capture_s <= cost.first_call_s
    assert qwen.throughput[EXACT].items_per_s == 2 * qwen.throughput[EXACT].calls_per_s
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
        (["--baselines", "vllm"], "invalid choice"),
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
    assert on_cuda.batches == (1, 4, 16, 64)
    assert on_cuda.baselines == (METADATA, HAND_MADE, POWER_OF_TWO, BOUND)
    assert on_cpu.baselines == (METADATA, BOUND)
    assert not on_cuda.kernels
    assert len(_resolve(["--quick"]).images) < len(on_cuda.images)


def test_the_bench_needs_no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmgraph.demo", None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "--help"])
    assert exit_.value.code == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["none"], ()),
        (["all"], tuple(BASELINES.values())),
        (["bound", "metadata"], (METADATA, BOUND)),
    ],
)
def test_baselines_can_be_chosen(given: list[str], expected: tuple[str, ...]) -> None:
    assert _resolve(["--device", "cpu", "--baselines", *given]).baselines == expected


def test_contradictory_baselines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cpu", "--baselines", "none", "bound"]) == 2
    assert "--baselines none bound" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, sizes = run_module._measure_row, []

    def second_fails(subject: Any, size: Any, *arguments: Any) -> Any:
        sizes.append(size.label)
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return measure(subject, size, *arguments)

    monkeypatch.setattr(run_module, "_measure_row", second_fails)
    command = ["bench", "--model", "clip:tiny", "--batch", "1", "2", "-n", "1"]
    options = ["--baselines", "none", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        cli.main([*command, *options])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
    report = Report.from_json((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [row.size for row in report.rows] == ["1"]
    assert not report.complete
    assert "not complete" in (tmp_path / "bench.md").read_text(encoding="utf-8")


@pytest.mark.gpu
def test_on_a_gpu_there_are_all_baselines_but_those_of_the_compiler() -> None:
    # Large enough that the error of an output is more than noise.
    sizes = ("--image", "224", "224x4", "--batch", "16")
    report = run(_resolve([*TINY[1:], *sizes, "--kernels", "--device", "cuda"]))
    assert report.environment.gpu
    for row in report.rows:
        assert row.ok, row
        assert row.absent == {}
        assert {HAND_MADE, POWER_OF_TWO, BOUND} <= row.timings.keys()
        for name in (HAND_MADE, POWER_OF_TWO):
            assert row.errors[name] <= 1.10 * row.errors[EAGER], (name, row)
        assert all(times["matmul"] > 0 for times in row.kernels.values())
    assert Report.from_json(report.to_json()) == report


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler has advice
def test_on_a_gpu_the_compiler_gives_what_eager_mode_gives() -> None:
    modes = ("compile", "compile-reduce-overhead")  # autotuning two tiny towers takes two minutes
    options = ("--image", "224x4", "--batch", "16", "--baselines", *modes, "--device", "cuda")
    for row in run(_resolve([*TINY[1:], *options])).rows:
        assert row.absent == {}
        for name in map(BASELINES.__getitem__, modes):
            assert row.errors[name] <= 1.10 * row.errors[EAGER], (name, row)


def _resolve(arguments: list[str]) -> BenchOptions:
    return BenchOptions.resolve(cli._parser("bench").parse_args(["bench", *arguments]))


def test_a_wrong_baseline_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = variants_module.lean_call

    def wrong(*arguments: Any, **more: Any) -> Any:
        call = original(*arguments, **more)
        return lambda: tree_map(torch.zeros_like, call())

    monkeypatch.setattr(variants_module, "lean_call", wrong)
    command = ["bench", "--model", "qwen2_5_vl:tiny", "--image", "56", "-n", "1", "--device", "cpu"]
    cli.main([*command, "--out", str(tmp_path), "--baselines", "metadata"])
    (row,) = Report.from_json((tmp_path / "bench.json").read_text()).rows
    assert METADATA not in row.timings
    assert METADATA not in row.throughput
    assert "outputs are wrong" in row.absent[METADATA]
