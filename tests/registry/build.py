"""Tiny models with random weights, none of them blank."""

from __future__ import annotations

import importlib
import json
import zlib
from typing import Any, cast

import torch
from torch import nn

from tests.registry.entry import Entry
from tests.registry.shrink import shrunk

__all__ = ["Absent", "build", "config_of", "identity", "is_absent", "require", "why_eager"]

_BLANK_BELOW, _BLANK_STD = 1e-3, 0.05


def identity(entry: Entry) -> str:
    """The same for entries that share a model."""
    parts = (entry.library, entry.model, entry.config, entry.start, entry.model_class)
    return json.dumps(parts, sort_keys=True, default=str)


class Absent(Exception):
    """The installed library doesn't have it, or can't run it yet."""


def is_absent(entry: Entry) -> bool:
    """Whether the installed library is older than the model."""
    return bool(entry.since) and _is_older(entry, entry.since)


def require(entry: Entry) -> None:
    """Do nothing where the installed library has the model and runs it.

    Raises:
        Absent: It doesn't.
    """
    if is_absent(entry):
        version = importlib.import_module(entry.library).__version__
        raise Absent(f"{entry.name} needs {entry.library} {entry.since}, this is {version}")


def why_eager(entry: Entry) -> str:
    """Why no graph serves it with the installed library; empty if one does."""
    version, reason = entry.eager_before
    if _is_older(entry, version):
        return reason
    return entry.eager


def _is_older(entry: Entry, version: str) -> bool:
    return _numbers(importlib.import_module(entry.library).__version__) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def config_of(entry: Entry) -> Any:
    """The tiny config of an entry of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[entry.model]
    return kind.from_dict(shrunk(kind(**entry.start).to_dict(), entry.config))


def build(entry: Entry, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The whole model on the CPU, in eval mode; global generators stay where they are."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(zlib.crc32(identity(entry).encode()))
        model = _made(entry, dtype)
        _fill_blanks(model)
    return model.eval()


def _made(entry: Entry, dtype: torch.dtype) -> nn.Module:
    if entry.library == "timm":
        import timm

        model = timm.create_model(entry.model, pretrained=False, num_classes=0, **entry.config)
        return cast(nn.Module, model).to(dtype)
    import transformers

    config = config_of(entry)
    if entry.model_class is None:
        return cast(nn.Module, transformers.AutoModel.from_config(config, dtype=dtype))
    kind = getattr(transformers, entry.model_class)
    return cast(nn.Module, kind._from_config(config, dtype=dtype))


@torch.no_grad()
def _fill_blanks(model: nn.Module) -> None:
    """Draw what a class leaves unset, at zero or all alike: on such a test passes by accident."""
    for parameter in model.parameters():
        if not parameter.numel():
            continue
        low, high = (float(x) for x in torch.aminmax(parameter))
        sound = _BLANK_BELOW < max(abs(low), abs(high)) < float("inf")
        if not sound or (parameter.dim() > 1 and low == high):
            parameter.normal_(std=_BLANK_STD)
