"""What can be told of a tower without running it."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from mmgraph.config import GraphConfig
from mmgraph.encoders import Tower, TowerEncoder, encoder_for
from mmgraph.errors import UnsupportedModelError
from mmgraph.graphs import flatten
from mmgraph.graphs.ways import as_if_capturing
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.modules import placement_problem
from mmgraph.modules.placement import main_dtype
from mmgraph.preparation.align import AlignedWeights
from mmgraph.preparation.blocks import find_blocks
from mmgraph.types import GraphKey, Refusal

__all__ = ["Argument", "Budget", "Capture", "TowerView", "view_tower"]

Capture = Literal["budgets", "exact", "eager"]
_SIZES = ("sizes", "shapes", "lens", "lengths", "coord", "position_ids")
"""Words in names of arguments whose values decide shapes inside a tower."""
_GRID = "grid_thw"


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter of the tower's forward."""

    name: str
    required: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """A size that is captured by default, and what its static buffers take."""

    tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerView:
    """One tower of a model.

    Attributes:
        name: Its path, "" for the model itself.
        class_name: Its class.
        methods: Methods through which it is called.
        layout: "packed" or "rows".
        modalities: Of "image", "video", "audio".
        arguments: Of the first method.
        parameters: Numbers in its weights.
        num_bytes: Bytes of them.
        dtype: Of its weights.
        capture: "budgets" (the whole tower, for token budgets), "exact" (graphs of exact calls)
            or "eager".
        why: The reason for `capture`.
        budgets: The default ladder, ascending; empty where there is none.
        buffer_bytes: Static buffers of the whole ladder; its graphs share the largest.
        no_budgets: Why there is no ladder.
        blocks: Repeated blocks that are compiled on a GPU.
        padded_layers: Linear layers that get padded weights on a GPU.
        padded_widths: Their odd widths, before and after.
        shared: Parameters that more than one module holds.
        placement: Why no graph can use the weights where they are.
        advice: What the user can do.
    """

    name: str
    class_name: str
    methods: tuple[str, ...]
    layout: str
    modalities: tuple[str, ...]
    arguments: tuple[Argument, ...]
    parameters: int
    num_bytes: int
    dtype: str
    capture: Capture
    why: str
    budgets: tuple[Budget, ...] = ()
    buffer_bytes: int = 0
    no_budgets: str | None = None
    blocks: int
    padded_layers: int
    padded_widths: dict[int, int] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    placement: str | None = None
    advice: tuple[str, ...] = ()


def view_tower(tower: Tower, model: nn.Module) -> TowerView:
    """Look at `tower` of `model`, which is left as it is."""
    module, encoder = tower.module, encoder_for(tower, tower.methods[0])
    arguments = _arguments(tower)
    on_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    placement = None if on_meta else placement_problem(module)
    capture, why = _capture(tower, arguments, placement)
    ladder = _Ladder()
    if capture == "budgets":
        ladder = _ladder(encoder)
        blocker, doubt = None, None
        if on_meta and ladder.smallest is not None:
            blocker, doubt = _dry_run(encoder, ladder.smallest)
        if blocker is not None:
            capture, why, ladder = "exact", blocker, _Ladder()
        elif doubt is not None:
            ladder = _Ladder(why_none=doubt)
    padded_layers, padded_widths = _padding(module)
    return TowerView(
        name=tower.name,
        class_name=type(module).__name__,
        methods=tower.methods,
        layout=tower.layout,
        modalities=tower.modalities,
        arguments=arguments,
        parameters=sum(p.numel() for p in module.parameters()),
        num_bytes=sum(p.nbytes for p in module.parameters()),
        dtype=str(main_dtype(module)).removeprefix("torch."),
        capture=capture,
        why=why,
        budgets=ladder.budgets,
        buffer_bytes=ladder.num_bytes,
        no_budgets=ladder.why_none,
        blocks=len(find_blocks(module)),
        padded_layers=padded_layers,
        padded_widths=padded_widths,
        shared=_shared(tower, model),
        placement=placement,
        advice=_advice(capture, arguments, ladder, padded_layers),
    )


def _arguments(tower: Tower) -> tuple[Argument, ...]:
    method = getattr(type(tower.module), tower.methods[0])
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return tuple(Argument(p.name, p.default is p.empty) for p in parameters if p.kind in named)


def _capture(
    tower: Tower, arguments: tuple[Argument, ...], placement: str | None
) -> tuple[Capture, str]:
    if placement is not None:
        return "eager", placement
    main = arguments[0].name
    sizes = [a.name for a in arguments[1:] if a.name != _GRID and _is_size(a.name)]
    if tower.layout == "packed":
        needed = [a.name for a in arguments[1:] if a.required and a.name != _GRID]
        if needed:
            return "exact", f"besides {main} and {_GRID} it needs {_and(needed)}"
        return "budgets", f"{main} and {_GRID} say all about a call"
    if sizes:
        return "exact", f"what {_and(sizes)} holds may decide shapes inside the tower"
    return "budgets", f"each row of {main} is encoded by itself"


def _is_size(name: str) -> bool:
    return any(word in name for word in _SIZES)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Budgets, bytes of the static buffers, the smallest key; or why there is no ladder."""

    budgets: tuple[Budget, ...] = ()
    num_bytes: int = 0
    smallest: GraphKey | None = None
    why_none: str | None = None


def _ladder(encoder: TowerEncoder) -> _Ladder:
    manager = EncoderCudaGraphManager(
        GraphConfig(backend="trace"), encoder.device, encoder.dtype, encoder
    )
    largest: dict[int, int] = {}
    try:
        keys = manager.keys_to_capture()
        for key in keys:
            specs = encoder.capture_inputs(key).values()
            num_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)
            largest[key.token_budget] = max(num_bytes, largest.get(key.token_budget, 0))
    except (UnsupportedModelError, Refusal) as error:
        return _Ladder(why_none=str(error))
    budgets = tuple(Budget(tokens, largest[tokens]) for tokens in sorted(largest))
    return _Ladder(budgets, max(largest.values()), keys[-1])


@torch.no_grad()
def _dry_run(encoder: TowerEncoder, key: GraphKey) -> tuple[str | None, str | None]:
    """Say why no budget can serve the tower, or why that can't be told; each ``None`` if not so.

    On the meta device there are shapes and no values, as in a graph: what reads a value there
    can't be captured.
    """
    packed = encoder.tower.layout == "packed"
    specs = encoder.capture_inputs(key)
    buffers = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in specs.items()
    }
    try:
        with as_if_capturing(True):  # transformers looks into masks otherwise
            tensors, _ = flatten(encoder.encoder_forward(buffers, key))
    except Exception as error:  # whatever the tower says to a budget
        if "meta tensor" in str(error):
            return "inside, it reads values of its inputs on the host", None
        text = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        if packed:
            return f"it doesn't run for a budget ({text})", None
        return None, f"an example made from its config isn't a full call ({text})"
    if packed and any(t.dim() > 2 and t.shape[0] == 1 for t in tensors):
        return "it packs along dimension 1", None
    return None, None


def _padding(module: nn.Module) -> tuple[int, dict[int, int]]:
    """Linear layers with odd widths; on copies without weights, so that none moves."""
    twin, holders = nn.Module(), _holders(module)
    for i, layer in enumerate(m for m in module.modules() if type(m) is nn.Linear):
        if any(holders[id(p)] > 1 for p in layer.parameters()):
            continue  # tied weights stay where they are
        shape = (layer.in_features, layer.out_features)
        dtype = layer.weight.dtype
        like = nn.Linear(*shape, bias=layer.bias is not None, device="meta", dtype=dtype)
        twin.add_module(str(i), like)
    weights = AlignedWeights(twin)
    return len(weights), dict(sorted(weights.widths.items()))


def _shared(tower: Tower, model: nn.Module) -> tuple[str, ...]:
    """Names of the tower's parameters that it holds twice or that the model holds elsewhere too."""
    holders = _holders(model)
    return tuple(n for n, p in tower.module.named_parameters() if holders[id(p)] > 1)


def _holders(module: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by its id."""
    return Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))


def _advice(
    capture: Capture,
    arguments: tuple[Argument, ...],
    ladder: _Ladder,
    padded_layers: int,
) -> tuple[str, ...]:
    lines: list[str] = []
    on_host = [a.name for a in arguments[1:] if a.name == _GRID or _is_size(a.name)]
    if capture == "eager":
        lines.append("put the whole encoder on one GPU: encoder and offloaded text model may part")
    if on_host and capture != "eager":
        lines.append(f"keep {_and(on_host)} on the CPU: on a GPU, reading it costs a wait a call")
    if capture == "exact":
        lines.append(
            "use few different sizes: a graph comes when a size comes a second time; "
            'GraphConfig(mode="piecewise") takes that way from the start'
        )
    if ladder.budgets:
        lines.append(
            'GraphConfig(capture="upfront") captures the ladder before the first call; '
            "row_budgets or token_budgets set another"
        )
    if ladder.why_none is not None:
        lines.append('leave capture="lazy": sizes are learnt from the calls')
    if padded_layers:
        lines.append("GraphConfig(align_weights=False) leaves the weights where they are")
    return tuple(lines)


def _and(names: list[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
