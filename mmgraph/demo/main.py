"""Runs the demo: eager first, then attached, and compares."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mmgraph.attachment import Handle, attach
from mmgraph.bench.options import positive
from mmgraph.demo.ids import Generated, compare_ids, generate, relative_error, widened
from mmgraph.demo.photos import load_photos
from mmgraph.demo.scenes import Call, Scene, scenes
from mmgraph.encoders import eager_towers
from mmgraph.errors import MMGraphError
from mmgraph.stats import EncoderStats
from mmgraph.types import Reason

__all__ = ["Row", "add_arguments", "main"]

_MAX_ERROR_RATIO = 1.10
_MAX_ERROR_F32 = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table. Times are medians in ms; errors relative, in the Frobenius norm."""

    model: str
    items: str
    tokens: int
    graphs: str
    padding: str
    eager_ms: float
    graph_ms: float
    error: float
    eager_error: float
    same_ids: str
    ok: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a command line parser."""
    parser.add_argument(
        "--image", nargs="+", default=[], metavar="FILE", help="pictures of your own"
    )
    parser.add_argument("-n", type=positive, help="timed repeats (default: 20, 3 on a CPU)")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if every answer matched and graphs were replayed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    repeats = arguments.n or (20 if device.type == "cuda" else 3)
    try:
        photos = load_photos(arguments.image)
        rows = [
            row for build in scenes(photos, device) for row in run_scene(build(), device, repeats)
        ]
    except MMGraphError as error:
        print(f"mmgraph demo: {error}", file=sys.stderr)
        return 2
    print(render(rows))
    failed = [row for row in rows if not row.ok]
    if failed:
        print(f"{len(failed)} of {len(rows)} calls did not match eager or ran without a graph")
    replayed = any(row.graphs for row in rows)
    if not replayed:
        print("nothing was replayed")
    return 0 if replayed and not failed else 1


@torch.no_grad()
def run_scene(scene: Scene, device: torch.device, repeats: int) -> list[Row]:
    """Run every call of a scene in eager mode, then attached."""
    print(f"\n{scene.name}: {len(scene.calls)} calls", flush=True)
    eager = [_measure(call.encode, device, repeats) for call in scene.calls]
    eager_ids = [
        generate(scene.model, call.prompt) if call.prompt else None for call in scene.calls
    ]
    truth = _float32_outputs(scene)
    with attach(scene.model, scene.config) as handle:
        rows = [
            _attached_row(scene, call, handle, device, repeats, *results)
            for call, results in zip(
                scene.calls, zip(eager, eager_ids, truth, strict=True), strict=True
            )
        ]
        print(handle.report(), flush=True)
    return rows


def _attached_row(
    scene: Scene,
    call: Call,
    handle: Handle,
    device: torch.device,
    repeats: int,
    eager: tuple[Any, float],
    eager_ids: Generated | None,
    truth: list[torch.Tensor],
) -> Row:
    before = handle.stats()
    output = call.encode()
    after = handle.stats()
    used = _replays(after) - _replays(before)
    _, graph_ms = _measure(call.encode, device, repeats)
    same = "-"
    if call.prompt is not None and eager_ids is not None:
        ids = generate(scene.model, call.prompt)
        same = compare_ids(scene.model, call.prompt, eager_ids, ids)
    tokens, padding = after.tokens - before.tokens, after.padding - before.padding
    against = _error(output, truth), _error(eager[0], truth)
    close = _error(output, tensors(eager[0])) <= _MAX_ERROR_F32
    if device.type == "cuda":
        close = against[0] <= _MAX_ERROR_RATIO * against[1]
    return Row(
        model=scene.name,
        items=call.items,
        tokens=tokens,
        graphs=" + ".join(
            f"{n} x {budget}" if n > 1 else str(budget) for budget, n in used.items()
        ),
        padding=f"{100 * padding / max(1, tokens + padding):.0f} %",
        eager_ms=eager[1],
        graph_ms=graph_ms,
        error=against[0],
        eager_error=against[1],
        same_ids=same,
        ok=close and _is_same(same, device) and (bool(used) or _was_chosen(before, after)),
    )


def _is_same(ids: str, device: torch.device) -> bool:
    """Whether generated ids say that nothing is wrong; only half precision has ties."""
    return ids in ("-", "yes") or (ids == "tie" and device.type == "cuda")


def _was_chosen(before: EncoderStats, after: EncoderStats) -> bool:
    """Whether eager mode served a call because it is the faster way."""
    new = {r for r, n in after.misses.items() if n > before.misses.get(r, 0)}
    return new == {Reason.NOT_FASTER}


def _replays(stats: EncoderStats) -> Counter[int]:
    """Replays by token budget."""
    replays: Counter[int] = Counter()
    for graph in stats.graphs:
        replays[graph.key.token_budget] += graph.replays
    return replays


def render(rows: list[Row]) -> str:
    """Return the table as text."""
    head = ["model", "items", "tokens", "graph", "padding", "eager ms", "graph ms", "faster"]
    head += ["error", "eager's", "same ids", ""]
    body = [
        [
            row.model,
            row.items,
            str(row.tokens),
            row.graphs or "eager",
            row.padding,
            f"{row.eager_ms:.2f}",
            f"{row.graph_ms:.2f}",
            f"{row.eager_ms / row.graph_ms:.1f} x",
            f"{row.error:.1e}",
            f"{row.eager_error:.1e}",
            row.same_ids,
            "ok" if row.ok else "WRONG",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in body]
    title = "  ".join(c.ljust(w) for c, w in zip(head, widths, strict=True))
    return "\n".join(["", title, "-" * len(title), *lines])


def tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a model's output."""
    leaves = tree_leaves(output)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _error(output: Any, truth: list[torch.Tensor]) -> float:
    """The largest relative error of a tensor in `output`."""
    return max(relative_error(a, b) for a, b in zip(tensors(output), truth, strict=True))


def _measure(encode: Callable[[], Any], device: torch.device, repeats: int) -> tuple[Any, float]:
    """Return the first output and the median time of later calls in ms."""
    output, times = encode(), []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        encode()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return output, statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _float32_outputs(scene: Scene) -> list[list[torch.Tensor]]:
    """Outputs of the calls in float32, the standard that eager and graphs are both judged by."""
    with widened(scene.model), eager_towers():
        return [tensors(call.encode(torch.float32)) for call in scene.calls]
