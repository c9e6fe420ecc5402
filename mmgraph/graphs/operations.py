"""What folding has to know of torch's operations: what they read, write, upload and index by."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from mmgraph.errors import CaptureError
from mmgraph.graphs.guard import COPIES, HOST_READS, INDEXED, depends_on_mask
from mmgraph.graphs.segments import recording
from mmgraph.graphs.trees import flatten, tensors_in

__all__ = [
    "IsConstant",
    "ReadsContents",
    "Step",
    "chosen",
    "comes_from_host",
    "draws",
    "fresh",
    "makes_from_python",
    "positions",
    "python_data",
    "refuse_reads",
    "uploaded",
    "written",
]

_aten = torch.ops.aten
_FROM_PYTHON = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_MASKS = (torch.bool, torch.uint8)
_RANDOM = torch.Tag.nondeterministic_seeded
IsConstant = Callable[[Sequence[torch.Tensor]], bool]
"""Whether tensors have the same contents in each replay."""


class ReadsContents(CaptureError):
    """The call reads on the host what a graph would find in its buffers.

    Attributes:
        module: The innermost module whose forward does it; ``None`` where that is the whole call.
    """

    def __init__(self, what: str) -> None:
        running, self.module = _running_module()
        where = "" if running is None else f" in {type(running).__name__}"
        super().__init__(f"it reads data on the host{where}, at {what}")


class Step:
    """An operation of the observed run."""

    def __init__(self, func: Any, out: Any, *, constant: bool) -> None:
        self.func = func
        self.out = out if constant else None  # every activation at once may not fit
        self.constant = constant
        self.touches: frozenset[int] = frozenset()
        self.writes: frozenset[int] = frozenset()
        """Memory that it writes to, other than that of new results."""
        self.makes: frozenset[int] = frozenset()
        """Memory of its new results."""
        self.reads: list[torch.Tensor] = []
        """What it reads of that which is the same in each replay."""
        self.on_host = False
        """Whether it reads on the host, moves something between there and the device, or takes
        random numbers, whose state the host keeps."""
        self.returned: list[int] = []
        """For each result, its place among the inputs, or -1: what is written is returned."""
        self.indices: list[torch.Tensor | int] | None = None
        """Indices in a form that needs nothing of the host; a number is the place of one that
        stays as it is."""
        self.values: torch.Tensor | None = None
        """What an assignment uploads, on the device; ``None`` where it uploads nothing."""


def makes_from_python(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` makes a tensor of something else than a tensor."""
    return func in _FROM_PYTHON and not isinstance(python_data(func, args, kwargs), torch.Tensor)


def python_data(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a function makes a tensor of."""
    given = args[1:] if func is torch.Tensor.new_tensor else args
    return given[0] if given else kwargs.get("data", kwargs.get("obj"))


def refuse_reads(func: Any, args: Any, kwargs: Mapping[str, Any], is_constant: IsConstant) -> None:
    """Raise if an operation reads contents on the host.

    Raises:
        ReadsContents: It does.
    """
    if func in HOST_READS and kwargs.get("output_size") is None:
        raise ReadsContents(str(func))
    if func in INDEXED and depends_on_mask(args):
        masks = [i for i in args[1] if i is not None and i.dtype in _MASKS]
        if not is_constant(masks):
            raise ReadsContents(f"{func} with a mask")


def positions(args: tuple[Any, ...], is_constant: IsConstant) -> list[torch.Tensor | int] | None:
    """Indices with constants as positions on the device; ``None`` if they are so already.

    Indexing counts a mask on the host, unless it fills with one number, and uploads positions that
    lie there.
    """
    indexed, indices, counts = args[0], args[1], depends_on_mask(args)
    found: list[torch.Tensor | int] = []
    for place, index in enumerate(indices):
        if index is None or not is_constant([index]):
            found.append(place)
        elif index.dtype in _MASKS and counts:
            found.extend(index.nonzero().to(indexed.device).unbind(1))
        elif index.device != indexed.device:
            found.append(index.to(indexed.device))
        else:
            found.append(place)
    return None if all(isinstance(index, int) for index in found) else found


def uploaded(args: tuple[Any, ...], is_constant: IsConstant) -> torch.Tensor | None:
    """A constant of the host that is assigned to positions on a device, on that device."""
    if len(args) < 3 or args[2].device == args[0].device or not is_constant(args[2:3]):
        return None
    return None if depends_on_mask(args) or _is_fill(args) else args[2].to(args[0].device)


def _is_fill(args: tuple[Any, ...]) -> bool:
    """Whether a mask is filled with one number, which torch takes from the host as it is."""
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def chosen(places: Sequence[torch.Tensor | int], indices: Sequence[Any]) -> list[Any]:
    """Put those of `indices` that stay in their places among the others."""
    return [indices[p] if isinstance(p, int) else p for p in places]


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation takes random numbers; attention doesn't where nothing is dropped."""
    if _RANDOM not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, 0.0)
            return bool(given != 0.0)
    return True


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    named = [(a, v) for a, v in zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    return tensors_in([v for a, v in named if a.alias_info is not None and a.alias_info.is_write])


def _running_module() -> tuple[nn.Module | None, nn.Module | None]:
    """The innermost module whose forward is running in the call; twice, if another is around it."""
    innermost: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not recording.__code__:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            if innermost is not None and module is not innermost:
                return innermost, innermost
            if innermost is None and frame.f_code.co_name == "forward":
                innermost = module
        frame = frame.f_back
    return innermost, None


def comes_from_host(step: Step, inputs: list[torch.Tensor]) -> bool:
    """Whether running the operation in a graph would read what lies on the host."""
    if step.func is _aten.lift_fresh.default:
        return True
    devices = {tensor.device.type for tensor in (*inputs, *tensors_in(step.out))}
    return step.func in COPIES and len(devices) > 1


def fresh(step: Step, inputs: list[torch.Tensor]) -> Any:
    """The results of an operation again; autograd wants tensors that it hasn't seen yet."""
    tensors, rebuild = flatten(step.out)
    return rebuild(
        [
            _aten.alias.default(tensor) if place < 0 else inputs[place]
            for tensor, place in zip(tensors, step.returned, strict=True)
        ]
    )
