"""``mmgraph inspect``: resolve the name, look, print."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

from mmgraph.inspect.model import inspect_model
from mmgraph.inspect.source import resolve
from mmgraph.inspect.text import render
from mmgraph.inspect.trial import try_towers

__all__ = ["add_arguments", "main"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model",
        help="a recipe (qwen2.5-vl-7b), a folder, a model id in the local cache, a model type of "
        "transformers (clip), or a timm model (timm/vit_base_patch16_224); nothing is downloaded",
    )
    parser.add_argument(
        "--try",
        dest="run",
        action="store_true",
        help="run the towers, tiny or small, with random weights and the trace backend",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="bf16",
        help="of the weights: memory and padding depend on it (default: %(default)s)",
    )


def main(namespace: argparse.Namespace) -> int:
    """Inspect a model; 1 if it has no tower or a trial isn't equal to eager mode, else 0.

    Raises:
        ConfigError: The name stands for nothing, or a config can't be used.
        UnsupportedModelError: The model can't be built.
    """
    source = resolve(namespace.model)
    model = source.build("meta", _DTYPES[namespace.dtype])
    inspection = inspect_model(model, source.name, source.kind)
    if namespace.run:
        inspection = dataclasses.replace(inspection, trials=try_towers(source, model))
    if namespace.json:
        print(json.dumps(inspection.to_dict(), indent=1))
    else:
        print(render(inspection))
    return 0 if inspection.towers and all(trial.ok for trial in inspection.trials) else 1
