"""From what a user types to a model without weights. Nothing here goes to the network.

A name is, in this order: a recipe, a folder with a ``config.json``, ``timm/NAME``, a model type of
transformers, a model of timm, a model id in the local Hugging Face cache. The model is built on the
meta device, where a 70B takes seconds and no memory.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mmgraph.encoders import find_towers
from mmgraph.errors import ConfigError, UnsupportedModelError
from mmgraph.recipes import Recipe, list_recipes, load_recipe

__all__ = ["Parts", "Source", "resolve"]

_MAPPINGS = (
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_MAPPING",
)
_TIMM = "timm/"


class Parts(nn.ModuleDict):
    """Models of the sub-configs of a config that can't be built as a whole.

    The defaults of some classes don't fit together, mostly those of the text model.
    """


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be built.

    Attributes:
        name: What the user typed.
        kind: What it was taken for, in words.
        recipe: The recipe, if it is one.
    """

    name: str
    kind: str
    build_on: Callable[[torch.device, torch.dtype], nn.Module]
    recipe: Recipe | None = None

    def build(
        self, device: torch.device | str = "meta", dtype: torch.dtype = torch.bfloat16
    ) -> nn.Module:
        """The model in eval mode, on meta without weights, elsewhere with random ones.

        Raises:
            UnsupportedModelError: The library can't build it.
        """
        try:
            return self.build_on(torch.device(device), dtype).eval()
        except (UnsupportedModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any config may come here, and any class may choke on it
            raise UnsupportedModelError(
                f"{self.name} ({self.kind}) can't be built: {_in_a_line(error)}"
            ) from error


def resolve(name: str) -> Source:
    """What `name` stands for.

    Raises:
        ConfigError: It stands for nothing, and the message lists close names; or for a folder or
            a cached model whose config can't be used.
    """
    if name in list_recipes():
        recipe = load_recipe(name)
        return Source(name, "a recipe", _recipe_builder(recipe), recipe)
    if Path(name).is_dir() or Path(name).name == "config.json":
        return _folder(name)
    if name.startswith(_TIMM) and _is_timm(name.removeprefix(_TIMM)):
        return _timm(name, name.removeprefix(_TIMM))
    if name in _model_types():
        return Source(name, "a model type, with the defaults of its class", _type_builder(name))
    if _is_timm(name):
        return _timm(name, name)
    return _cached(name)


def _folder(name: str) -> Source:
    path = Path(name)
    file = path if path.name == "config.json" else path / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} has no config.json that can be read: {error}") from None
    if "architecture" in data and "model_type" not in data:  # as timm saves them
        arguments = data.get("model_args") or {}
        return Source(name, "a folder", partial(_build_timm, data["architecture"], arguments))
    return Source(name, "a folder", partial(_build, _read_config(str(file.parent), name)))


def _cached(name: str) -> Source:
    try:
        config = _read_config(name, name)
    except OSError:
        raise ConfigError(
            f"{name!r} is no recipe, folder, model type of transformers or timm model, and isn't "
            f"in the local Hugging Face cache{_suggestion(name)}"
        ) from None
    return Source(name, "a model in the local cache", partial(_build, config))


def _read_config(path: str, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except OSError:
        raise
    except Exception as error:  # custom code, a type that is too new, values out of range
        raise ConfigError(f"the config of {name} can't be used: {_in_a_line(error)}") from None


def _suggestion(name: str) -> str:
    known = [*list_recipes(), *_model_types(), *_timm_models()]
    close = difflib.get_close_matches(name.removeprefix(_TIMM), known, n=5, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def _model_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def _timm_models() -> list[str]:
    import timm

    return cast(list[str], timm.list_models())


def _is_timm(name: str) -> bool:
    import timm

    return bool(timm.is_model(name))  # which looks away from a tag: vit_base_patch16_224.mae


def _timm(name: str, model: str) -> Source:
    return Source(name, "a timm model", partial(_build_timm, model.partition(".")[0], {}))


def _recipe_builder(recipe: Recipe) -> Callable[[torch.device, torch.dtype], nn.Module]:
    return lambda device, dtype: recipe.build_model(device=device, dtype=dtype)


def _type_builder(name: str) -> Callable[[torch.device, torch.dtype], nn.Module]:
    def build(device: torch.device, dtype: torch.dtype) -> nn.Module:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return _build(CONFIG_MAPPING[name](), device, dtype)

    return build


def _build_timm(
    architecture: str, arguments: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    import timm

    with torch.device(device):
        model = timm.create_model(architecture, pretrained=False, **arguments)
    return cast(nn.Module, model).to(dtype)


def _build(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    try:
        kind = _model_class(config)
        with torch.device(device):
            return cast(nn.Module, kind._from_config(config, dtype=dtype))
    except Exception:
        parts = _build_parts(config, device, dtype)
        if not find_towers(parts):
            raise
        return parts


def _build_parts(config: Any, device: torch.device, dtype: torch.dtype) -> Parts:
    parts = Parts()
    for name in getattr(config, "sub_configs", ()):
        with contextlib.suppress(Exception):  # one that can't be built is what this is for
            parts[name] = _build(getattr(config, name), device, dtype)
    return parts


def _model_class(config: Any) -> Any:
    """The class that a user of `config` loads: what it names, else what transformers' autos do."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for name in _MAPPINGS:
        mapping = getattr(modeling_auto, name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    for found in _classes_beside(config):
        if getattr(found, "config_class", None) is type(config):
            return found
    raise UnsupportedModelError(
        f"transformers has no model class for {type(config).__name__}: give the model that holds it"
    )


def _classes_beside(config: Any) -> Iterator[Any]:
    """Model classes in the modeling file next to the config's own file, in their order."""
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        importlib.import_module(path)
    except ImportError:
        return
    for found in vars(sys.modules[path]).values():
        if inspect.isclass(found) and found.__module__ == path and hasattr(found, "_from_config"):
            bases = (c for c in found.__mro__ if c.__module__.startswith("transformers.models."))
            if any("forward" in vars(c) for c in bases):
                yield found


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
