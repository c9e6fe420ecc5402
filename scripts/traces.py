"""Four traces of what vision towers are sent: 500 calls each, from seeds, without any download.

    python -m scripts.traces --out /tmp/traces    # writes a JSON file a model

Sizes in pixels are modelled on public ones:

- camera: one 1280 x 720 stream, an image a call, as a webcam or a line camera gives.
- photos: one to four a call. Half as in COCO (the longer side 640, mostly 640 x 480 and 480 x 640,
  else any ratio from 1:1 to 16:9), a third as photo sites serve them (1024 or 1600 on the longer
  side, 3:2 or 4:3), the rest thumbnails of 224 to 512.
- documents: one to six pages a call: Letter and A4 scanned at 100, 150 and 200 dpi as in DocVQA's
  industry documents (1700 x 2200 is Letter at 200), pages cut short, now and then a slide.
- chat: an image or two (photos, screenshots of phones and desktops), and in one call of four a clip
  of 2 to 16 s, 2 frames a second, 640 x 360 to 1280 x 720.

Grids follow the rules of the models' own processors (patches of 14 or 16, groups of 2 x 2, 2 frames
a step): an image is rounded to whole groups and scaled to between a least and a largest number of
pixels; a clip is bounded as a whole.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

__all__ = ["MODELS", "TRACES", "Grid", "Rules", "Trace", "make_trace"]

Grid = tuple[int, int, int]
Size = tuple[int, int, int]
"""Frames, height and width in pixels; an image has one frame."""

CALLS = 500


@dataclass(frozen=True, slots=True)
class Rules:
    """How a model's processors turn pixels into patches.

    Attributes:
        patch: Side of a patch.
        min_pixels: Of an image, at least.
        max_pixels: At most.
        max_clip_pixels: Of all frames of a clip together, at most.
        merge: Patches on a side of what becomes one token.
        frames: Frames of a step in time.
    """

    patch: int
    min_pixels: int
    max_pixels: int
    max_clip_pixels: int
    merge: int = 2
    frames: int = 2

    def grid(self, size: Size) -> Grid:
        """Steps, and patches in height and width, of an image or a clip."""
        frames, height, width = size
        steps = max(1, -(-frames // self.frames))
        if frames == 1:
            height, width = self._fitted(height, width, 1, self.min_pixels, self.max_pixels)
        else:
            height, width = self._fitted(
                height, width, steps * self.frames, self.min_pixels, self.max_clip_pixels
            )
        return steps, height // self.patch, width // self.patch

    def _fitted(
        self, height: int, width: int, frames: int, least: int, most: int
    ) -> tuple[int, int]:
        """Whole groups of patches, as near as the bounds on all pixels allow."""
        side = self.patch * self.merge
        rounded = round(height / side) * side, round(width / side) * side
        pixels = frames * rounded[0] * rounded[1]
        if pixels > most:
            scale = math.sqrt(frames * height * width / most)  # in the order of the processors
            return _down(height / scale, side), _down(width / scale, side)
        if pixels < least:
            scale = math.sqrt(least / (frames * height * width))
            return _up(height * scale, side), _up(width * scale, side)
        return rounded


MODELS: dict[str, Rules] = {
    "qwen2_5_vl": Rules(14, 56 * 56, 1280 * 28 * 28, 16384 * 28 * 28 // 4),
    "qwen3_vl": Rules(16, 256 * 256, 2560 * 32 * 32, 16384 * 32 * 32 // 4),
}
"""By family. Bounds on images of Qwen3-VL and on clips are set below the processors' own, which
allow items of 65,536 patches: these traces are about items that servers allow."""


def _down(pixels: float, side: int) -> int:
    return max(side, math.floor(pixels / side) * side)


def _up(pixels: float, side: int) -> int:
    return math.ceil(pixels / side) * side


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls by the grids of their items."""

    name: str
    calls: tuple[tuple[Grid, ...], ...]


def make_trace(name: str, model: str, seed: int = 0, calls: int = CALLS) -> Trace:
    """The trace called `name` as `model` sees it; the pixels don't depend on the model."""
    random, rules = Random(f"{name} {seed}"), MODELS[model]
    sizes = [TRACES[name](random) for _ in range(calls)]
    return Trace(name, tuple(tuple(rules.grid(size) for size in call) for call in sizes))


def _camera(_: Random) -> list[Size]:
    return [(1, 720, 1280)]


def _photo(random: Random) -> Size:
    kind = random.random()
    if kind < 0.5:  # COCO
        short = 480 if random.random() < 0.7 else random.randint(360, 640)
        longer, shorter = 640, short
    elif kind < 0.83:
        longer = random.choice([1024, 1600])
        shorter = longer * 2 // 3 if random.random() < 0.6 else longer * 3 // 4
    else:
        longer = random.choice([224, 256, 320, 400, 512])
        shorter = longer if random.random() < 0.5 else longer * 3 // 4
    is_upright = random.random() < 0.35
    return (1, longer, shorter) if is_upright else (1, shorter, longer)


def _photos(random: Random) -> list[Size]:
    return [_photo(random) for _ in range(random.choices([1, 2, 3, 4], [60, 20, 10, 10])[0])]


def _page(random: Random) -> Size:
    if random.random() < 0.06:
        return 1, 1080, 1920
    width, height = random.choice([(8.5, 11.0), (8.27, 11.69)])
    dpi = random.choices([100, 150, 200], [25, 35, 40])[0]
    cut = 1.0 if random.random() < 0.8 else random.uniform(0.3, 0.9)
    return 1, int(height * dpi * cut), int(width * dpi)


def _documents(random: Random) -> list[Size]:
    return [_page(random) for _ in range(random.choices([1, 2, 3, 6], [50, 25, 15, 10])[0])]


def _clip(random: Random) -> Size:
    height, width = random.choice([(360, 640), (480, 854), (720, 1280)])
    return 2 * random.choice([2, 4, 8, 16]), height, width


def _chat(random: Random) -> list[Size]:
    screens = [(1, 2532, 1170), (1, 2400, 1080), (1, 1080, 1920), (1, 900, 1440)]
    items = [
        _photo(random) if random.random() < 0.6 else random.choice(screens)
        for _ in range(random.choices([0, 1, 2], [15, 65, 20])[0])
    ]
    if not items or random.random() < 0.12:
        items.append(_clip(random))
    return items


TRACES: dict[str, Callable[[Random], list[Size]]] = {
    "camera": _camera,
    "photos": _photos,
    "documents": _documents,
    "chat": _chat,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        traces = {name: make_trace(name, model, arguments.seed).calls for name in TRACES}
        (arguments.out / f"{model}.json").write_text(json.dumps(traces) + "\n", encoding="utf-8")
        for name, calls in traces.items():
            tokens = [sum(t * h * w for t, h, w in call) for call in calls]
            mean = sum(tokens) / len(tokens)
            print(
                f"{model} {name}: {len(set(calls))} kinds of call, "
                f"{min(tokens)} to {max(tokens)} patches, {mean:.0f} on average"
            )


if __name__ == "__main__":
    main()
