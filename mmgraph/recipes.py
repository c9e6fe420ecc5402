"""Named encoders: released sizes with random weights, and tiny ones for tests.

A recipe is data (`models/<family>/recipe.json`, installed as `mmgraph/_models`): which classes of
transformers or timm make the model, and the config of each named size. This module reads the
data and builds from it. transformers and timm are imported by the methods that build, never by
importing this module, and nothing is downloaded. Tiny models start from larger weights than their
libraries' default (standard deviation 1/sqrt(width)): with the default, attention and positions
hardly reach the output of so narrow a model, and a test would not feel them go wrong.

    load_recipe("qwen2.5-vl-7b").build_encoder(device="cuda", dtype=torch.bfloat16)
    load_recipe("qwen2_5_vl:tiny").build_model()
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from mmgraph.errors import ConfigError, UnsupportedModelError

__all__ = ["Recipe", "families", "list_recipes", "load_recipe"]

_TINY_SUFFIX = ":tiny"
_BLANK_BELOW = 1e-3  # a parameter with no entry above this is as good as zero
_BLANK_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to build one named model and its encoder.

    "Model" is what a user loads (the whole vision-language model, or Whisper with its decoder);
    "encoder" is the tower inside it that mmgraph captures. For pure encoders (CLIP, DINOv2, timm)
    the two are the same module.
    """

    name: str
    """The name it was loaded by: `"qwen2.5-vl-7b"`, `"qwen2_5_vl:tiny"`."""
    family: str
    """The folder under `models/`, also the model type in transformers where there is one."""
    library: Literal["transformers", "timm"]
    """Who defines the architecture."""
    layout: Literal["packed", "rows"]
    """What the tower's input looks like: concatenated patches with a grid, or independent rows."""
    feature_methods: Mapping[str, str]
    """By modality, the method that runs the tower: of the model for vision-language models, of the
    encoder itself (`"forward"`) for the others."""
    model_class: str
    """Import path of the model class, or of timm's factory."""
    config_class: str | None = None
    """Import path of the config class; None for timm, whose config is keyword arguments."""
    encoder_class: str | None = None
    """Import path of the tower's class; None where the model is the encoder."""
    encoder_config: str | None = None
    """Attribute of the model's config that configures the tower; None for the config itself."""
    encoder_path: str = ""
    """Where the model holds the tower (`"model.visual"`); empty where the model is the encoder."""
    encoder_parameters_m: float | None = None
    """Parameters of the released tower in millions, by formula; None for tiny recipes."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """By argument of the tower's forward, what it holds, for towers that take more than their
    layout says; empty for the others. `mmgraph.bench.inputs` knows the words and makes them."""
    input_facts: Mapping[str, int] = field(default_factory=dict)
    """Numbers that `inputs` need and the tower's config lacks. `"merge"`: side in patches of the
    groups that become one token (default 1). `"length"`: patches that each image is padded to, or
    mel frames of a usual clip, where items have no size of their own. `"multiple"`: mel frames are
    padded to a multiple of it."""
    overrides: Mapping[str, Any] = field(repr=False)
    """What the config sets, over the defaults of its class."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the tower encodes: of `"image"`, `"video"` and `"audio"`."""
        return tuple(self.feature_methods)

    def config(self) -> Any:
        """A new transformers config, or for timm a new dict of `timm.create_model` arguments.

        Raises:
            UnsupportedModelError: The installed library is missing or has no such class.
        """
        overrides = copy.deepcopy(dict(self.overrides))
        return overrides if self.config_class is None else _load(self.config_class)(**overrides)

    def build_model(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> nn.Module:
        """The whole model with random weights, in eval mode.

        Args:
            device: Where the weights are made; `"meta"` makes none.
            dtype: Of all parameters.
            seed: Of the weights. The global generators are left as they were.

        Raises:
            UnsupportedModelError: The installed library is missing or has no such class.
        """
        return self._build(self.model_class, self.config(), torch.device(device), dtype, seed)

    def build_encoder(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> nn.Module:
        """The tower alone, as the model would hold it: no language model is allocated.

        Arguments and errors are those of `build_model`; the weights differ from those that
        `build_model` draws for its tower from the same seed.
        """
        config = self.config()
        if self.encoder_config is not None:
            config = getattr(config, self.encoder_config)
        path = self.encoder_class or self.model_class
        return self._build(path, config, torch.device(device), dtype, seed)

    def encoder_of(self, model: nn.Module) -> nn.Module:
        """The tower inside a model that `build_model` made."""
        if not self.encoder_path:
            return model
        return cast(nn.Module, operator.attrgetter(self.encoder_path)(model))

    def _build(
        self, path: str, config: Any, device: torch.device, dtype: torch.dtype, seed: int
    ) -> nn.Module:
        factory = _load(path)
        with _construction(device, dtype, seed):
            if self.library == "timm":
                module = cast(nn.Module, factory(**config))
            else:
                module = cast(nn.Module, factory._from_config(config, dtype=dtype))
            _fill_blank_parameters(module)
        return module.eval()


def families() -> list[str]:
    """The families that have a recipe, sorted."""
    return sorted(path.parent.name for path in _models_folder().glob("*/recipe.json"))


def list_recipes() -> list[str]:
    """Every name that `load_recipe` takes, sorted: the released sizes and each family's tiny."""
    return sorted(name for family in families() for name in _names(_read(family)))


def load_recipe(name: str) -> Recipe:
    """The recipe of a released size (`"qwen2.5-vl-7b"`) or of a tiny model (`"qwen2_5_vl:tiny"`).

    Raises:
        ConfigError: No recipe has this name; the message lists the closest ones.
    """
    for family in families():
        data = _read(family)
        if name in _names(data):
            variants, tiny = data.pop("variants"), data.pop("tiny")
            variant = tiny if name.endswith(_TINY_SUFFIX) else variants[name]
            overrides = variant.pop("config")
            return Recipe(name=name, overrides=overrides, **data, **variant)
    known = list_recipes()
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    raise ConfigError(
        f"no recipe is named {name!r}; did you mean {', '.join(map(repr, close))}? "
        "mmgraph.recipes.list_recipes() lists all names"
    )


def _models_folder() -> Path:
    """`mmgraph/_models` in an installed wheel, `models` beside the package in a checkout."""
    package = Path(__file__).parent
    installed = package / "_models"
    return installed if installed.is_dir() else package.parent / "models"


def _read(family: str) -> dict[str, Any]:
    text = (_models_folder() / family / "recipe.json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


def _names(data: Mapping[str, Any]) -> list[str]:
    return [*data["variants"], data["family"] + _TINY_SUFFIX]


def _load(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        library = path.partition(".")[0]
        raise UnsupportedModelError(
            f"{path} cannot be imported ({error}); install or upgrade {library}"
        ) from error


@contextlib.contextmanager
def _construction(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Seeded construction on `device` in `dtype`; generators and defaults are put back after it."""
    cuda = [device] if device.type == "cuda" else []
    before = torch.get_default_dtype()
    with torch.random.fork_rng(cuda, device_type="cuda"), torch.device(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach every device
        for forked in cuda:
            with torch.cuda.device(forked):
                torch.cuda.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@torch.no_grad()
def _fill_blank_parameters(module: nn.Module) -> None:
    """Draw what the library leaves at zero, at one or unset (biases, position tables).

    Trained weights are not all alike there, and a test on such passes by accident.
    """
    for parameter in module.parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        largest = float(torch.linalg.vector_norm(parameter, float("inf")))
        blank = not _BLANK_BELOW < largest < float("inf")  # NaN is neither
        if blank or (parameter.dim() > 1 and parameter.max() == parameter.min()):
            parameter.normal_(std=_BLANK_STD)
