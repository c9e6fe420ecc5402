"""Options of the benchmark: what the user wants, completed by what suits the machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mmgraph.bench.names import BASELINES, BOUND, HAND_MADE, METADATA, POWER_OF_TWO
from mmgraph.bench.sizes import ImageSize, parse_image
from mmgraph.errors import ConfigError
from mmgraph.recipes import Recipe, load_recipe

__all__ = ["BenchOptions", "add_arguments", "positive"]

_ALL, _NONE = "all", "none"
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Defaults:
    models: tuple[str, ...]
    images: tuple[str, ...]
    batches: tuple[int, ...]
    dtype: str
    baselines: tuple[str, ...]
    repeats: int = 30


_CUDA = _Defaults(
    models=(
        "qwen2.5-vl-7b",
        "qwen3-vl-8b",
        "siglip-so400m-384",
        "clip-l-336",
        "timm-vit-b16-224",
        "timm-vit-l16-224",
        "dinov2-l",
        "whisper-large-v3",
    ),
    images=("224", "448", "784", "1344", "448x4", "448x8", "448x16"),
    batches=(1, 4, 16, 64),
    dtype="bf16",
    baselines=(METADATA, HAND_MADE, POWER_OF_TWO, BOUND),
)
_CUDA_QUICK = replace(_CUDA, images=("224", "448x4"), batches=(1, 4), repeats=10)
_CPU = _Defaults(
    models=(
        "qwen2_5_vl:tiny",
        "qwen3_vl:tiny",
        "siglip:tiny",
        "clip:tiny",
        "timm:tiny",
        "whisper:tiny",
    ),
    images=("56", "112", "224", "112x4"),
    batches=(1, 2, 4),
    dtype="float32",
    baselines=(METADATA, BOUND),
)
_CPU_QUICK = replace(_CPU, images=("56", "112x2"), batches=(1, 2), repeats=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A benchmark to run."""

    device: torch.device
    """Where to run it."""
    dtype: torch.dtype
    """Of weights and inputs."""
    recipes: tuple[Recipe, ...]
    """Models, measured one after another."""
    images: tuple[ImageSize, ...]
    """Calls of towers for any size of image."""
    batches: tuple[int, ...]
    """Calls of the other towers."""
    repeats: int
    """Timed calls of each variant."""
    warmup: int
    """Calls of each variant before them."""
    baselines: tuple[str, ...] = ()
    """Variants to measure besides eager mode and mmgraph."""
    kernels: bool = False
    """Whether to profile each call, too."""
    commit: str | None = None
    """Commit to report where the tree has no git history of its own."""

    @classmethod
    def resolve(cls, namespace: argparse.Namespace) -> BenchOptions:
        """Complete what was given on the command line.

        Raises:
            ConfigError: A model has no recipe, the device isn't there, or the baselines contradict
                each other.
        """
        device = _device(namespace.device)
        defaults = {
            (True, False): _CUDA,
            (True, True): _CUDA_QUICK,
            (False, False): _CPU,
            (False, True): _CPU_QUICK,
        }[device.type == "cuda", namespace.quick]
        return cls(
            device=device,
            dtype=DTYPES[namespace.dtype or defaults.dtype],
            recipes=tuple(load_recipe(name) for name in namespace.model or defaults.models),
            images=tuple(namespace.image or map(parse_image, defaults.images)),
            batches=tuple(namespace.batch or defaults.batches),
            repeats=namespace.repeats or defaults.repeats,
            warmup=namespace.warmup,
            baselines=_baselines(namespace.baselines, defaults.baselines),
            kernels=namespace.kernels,
            commit=namespace.commit,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mmgraph bench``."""
    add = parser.add_argument
    add("--model", nargs="+", metavar="NAME", help="recipes; default: eight encoders")
    add(
        "--image",
        nargs="+",
        type=_image,
        metavar="SIZE[xCOUNT]",
        help="calls of towers for any size of image: square ones of SIZE pixels, COUNT of them",
    )
    add("--batch", nargs="+", type=positive, metavar="N", help="calls of other towers: N rows")
    add("--dtype", choices=DTYPES, help="default: bf16 on CUDA, else float32")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("-n", "--repeats", type=positive, metavar="N", help="timed calls; default: 30")
    add("--warmup", type=_count, default=2, metavar="N", help="calls before them; default: 2")
    add(
        "--baselines",
        nargs="+",
        choices=(*BASELINES, _ALL, _NONE),
        metavar="NAME",
        help=f"what to compare with besides eager mode: of {', '.join(BASELINES)}, or {_ALL} or "
        f"{_NONE}; those of the compiler take a minute or more a call; default: metadata, graph, "
        "power-of-two, bound (those that need no GPU, where there is none)",
    )
    add("--kernels", action="store_true", help="also profile each call, by class of kernel")
    add("--out", type=Path, metavar="DIR", help="write bench.json, bench.md and bench.png there")
    add(
        "--commit",
        metavar="SHA",
        help="commit to report, where .git is missing or not its own",
    )
    add("--quick", action="store_true", help="fewer sizes and repeats, where none are given")


def _baselines(given: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Variants by what was given on the command line."""
    if given is None:
        return default
    if len(given) > 1 and {_ALL, _NONE} & set(given):
        raise ConfigError(
            f"--baselines {' '.join(given)}: give {_ALL} or {_NONE} alone, or names of baselines"
        )
    if given == [_NONE]:
        return ()
    return tuple(v for name, v in BASELINES.items() if name in given or given == [_ALL])


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here; leave --device away to run on the CPU"
        )
    return torch.device(name or ("cuda" if available else "cpu"))


def _image(text: str) -> ImageSize:
    try:
        return parse_image(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A number from 1, as a command line gives it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)
