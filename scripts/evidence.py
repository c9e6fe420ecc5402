"""Everything that a GPU has to show for a commit, part by part, as far as the time reaches.

    python -m scripts.evidence --out out/evidence                  # all parts
    python -m scripts.evidence --out out/evidence --seconds 500 tests registry demo

Each part is a command with a limit of its own; what it says goes to PART.txt, failures of tests to
failures.txt as they come, and evidence.json says how each ended. A part that the time doesn't reach
is named and not begun. Exits with 1 unless all parts that were asked for ended well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mmgraph.bench.environment import Environment

__all__ = ["PARTS", "Part", "Result", "main", "run"]

_LEAST = 20.0
"""Seconds below which no part is begun."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command and the seconds that it may take at most."""

    command: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a part ended.

    Attributes:
        part: Its name.
        command: What was run.
        seconds: How long it took.
        code: Its exit code; ``None`` if it was ended by its limit, or never begun.
        last: The last line that it said.
    """

    part: str
    command: str
    seconds: float
    code: int | None
    last: str

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


def parts(out: Path, workers: int) -> dict[str, Part]:
    """The parts by name, in the order in which they are run."""
    pytest = (sys.executable, "-m", "pytest", "-q", "--tb=short", "-n", str(workers))
    others = tuple(f"--ignore=tests/{name}" for name in ("registry", "pipeline", "notebooks"))
    registry = ("tests/registry", "--registry-results", str(out / "registry.json"))
    notebook = "notebooks/latency_comparison.ipynb"
    traces = (sys.executable, "-m", "scripts.bench_traces", "--model")
    soak = (sys.executable, "-m", "scripts.soak", "--model", "qwen2_5_vl:tiny", "--largest", "12")
    module = (sys.executable, "-m")
    bench = (*module, "mmgraph", "bench", "-n", "8", "--model")
    packed = ["qwen2.5-vl-7b", "qwen3-vl-8b", "--image", "224", "448", "1344", "448x8", "--kernels"]
    rows = ["siglip-so400m-384", "clip-l-336", "timm-vit-b16-224", "timm-vit-l16-224", "dinov2-l"]
    rows += ["whisper-large-v3", "--batch", "1", "4", "16", "64"]
    rows += ["--baselines", "graph", "power-of-two"]
    # Each mode by itself: what takes too long must not take the others with it.
    modes = ("compile", "compile-reduce-overhead", "compile-max-autotune")
    compiled = ("qwen2.5-vl-7b", "--image", "448", "--baselines")
    return {
        "tests": Part((*pytest, "-m", "gpu", "tests", *others), 300),
        "pipeline": Part((*pytest, "-m", "gpu", "tests/pipeline"), 180),
        "registry": Part((*pytest, "-m", "gpu and not slow", *registry), 120),
        "whole-registry": Part((*pytest, "-m", "gpu and slow", "tests/registry"), 240),
        "multi-gpu": Part((*pytest, "-m", "multi_gpu", "tests"), 120),
        "demo": Part((*module, "mmgraph", "demo"), 180),
        "bench": Part((*module, "mmgraph", "bench", "-n", "10", "--out", str(out / "bench")), 600),
        "bench-packed": Part((*bench, *packed, "--out", str(out / "packed")), 280),
        "bench-rows": Part((*bench, *rows, "--out", str(out / "rows")), 280),
        **{
            f"bench-{mode}": Part((*bench, *compiled, mode, "--out", str(out / mode)), 590)
            for mode in modes
        },
        "start": Part((*module, "scripts.bench_start", "--out", str(out)), 240),
        "traces-qwen2.5": Part(
            (*traces, "qwen2.5-vl-7b", "--out", str(out), "--seconds", "225"), 270
        ),
        "traces-qwen3": Part((*traces, "qwen3-vl-8b", "--out", str(out), "--seconds", "225"), 270),
        "soak": Part(
            (
                *soak,
                "--calls",
                "100000",
                "--seconds",
                "400",
                "--between",
                "3",
                "--max-graphs",
                "16",
            ),
            460,
        ),
        "notebook": Part(
            (*module, "scripts.run_notebook", notebook, str(out / Path(notebook).name)), 240
        ),
    }


PARTS = tuple(parts(Path(), 1))


def run(
    chosen: dict[str, Part],
    out: Path,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run parts one after another, each for no longer than its limit and what is left."""
    out.mkdir(parents=True, exist_ok=True)
    end = clock() + seconds
    results: list[Result] = []
    for name, part in chosen.items():
        left = min(part.seconds, end - clock())
        result = (
            _run(name, part, out, left)
            if left >= _LEAST
            else Result(name, " ".join(part.command), 0.0, None, "no time was left for it")
        )
        print(f"{name:16} {'ok' if result.ok else 'NOT':4} {result.seconds:6.0f} s  {result.last}")
        results.append(result)
        _write(results, out)
    return results


def _run(name: str, part: Part, out: Path, seconds: float) -> Result:
    environment = {**os.environ, "MMGRAPH_TEST_FAILURES": str(out / "failures.txt")}
    start = time.monotonic()
    code: int | None = None
    with (out / f"{name}.txt").open("w", encoding="utf-8") as said:
        # A session of its own, so that processes which it starts can be ended with it.
        process = subprocess.Popen(
            part.command,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"ended after {seconds:.0f} s", file=said)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = (out / f"{name}.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Result(name, " ".join(part.command), time.monotonic() - start, code, last[:120])


def _write(results: Sequence[Result], out: Path) -> None:
    data = {
        "environment": asdict(Environment.read(_device())),
        "parts": [asdict(result) for result in results],
    }
    (out / "evidence.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.evidence", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", default=[])
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes out")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all parts together")
    parser.add_argument("--workers", type=int, default=8, help="processes of the tests")
    options = parser.parse_args(arguments)
    known = parts(options.out, options.workers)
    chosen = {name: known[name] for name in options.parts or PARTS}
    results = run(chosen, options.out, options.seconds)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
