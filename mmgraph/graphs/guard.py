"""Finding what can't be captured before a capture is tried.

A capture that fails costs its memory pool (see ``cuda.py``), so the last warm-up runs under a
dispatch mode that refuses what would break it: reading data on the host, shapes that depend on
data, copies between host and device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmgraph.errors import CaptureError

__all__ = [
    "COPIES",
    "HOST_READS",
    "INDEXED",
    "BrokenCapture",
    "CaptureGuard",
    "HostAccess",
    "depends_on_mask",
]

_aten = torch.ops.aten
HOST_READS = frozenset(
    {
        _aten._local_scalar_dense.default,
        _aten.is_nonzero.default,
        _aten.equal.default,
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten._unique2.default,
        _aten.unique_consecutive.default,
        _aten.unique_dim.default,
        _aten.bincount.default,
        _aten.repeat_interleave.Tensor,
    }
)
_MASKS = (torch.bool, torch.uint8)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_CONSTANT = _aten.lift_fresh.default
COPIES = frozenset({_aten._to_copy.default, _aten.copy_.default})
INDEXED = frozenset({_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default})
_WATCHED = HOST_READS | INDEXED | {_CONSTANT}


class HostAccess(CaptureError):
    """A call reads data on the host or uploads some; that may be the same in each call."""


class BrokenCapture(CaptureError):
    """CUDA refused something while it recorded, that the guard can't see."""


class CaptureGuard(TorchDispatchMode):
    """Within it an operation that a CUDA graph can't hold raises ``HostAccess``.

    Args:
        devices: Types of device that a graph would run on.
    """

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self._devices = devices or ("cuda",)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(_COMPOSITE):
            with self:  # in this mode torch takes nothing apart before it gets here
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if func in _WATCHED and self._on_device(args, kwargs):
            if func in HOST_READS and kwargs.get("output_size") is None:
                raise HostAccess(f"it reads data on the host, at {func}")
            if func in INDEXED and depends_on_mask(args):
                raise HostAccess(f"the shape of a result depends on data, at {func} with a mask")
            # torch.tensor(...) copies with all modes off; one on the host may well stay there.
            if func is _CONSTANT and "cpu" not in self._devices:
                raise HostAccess("it makes a tensor on the device from numbers on the host")
        if func in INDEXED and uploads(args):
            raise HostAccess(f"it uploads positions or values from the host, at {func}")
        output = func(*args, **kwargs)
        if func in COPIES and len({t.device.type for t in _tensors((args, output), kwargs)}) > 1:
            raise HostAccess(f"it copies between host and device, at {func}")
        return output

    def _on_device(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        return any(t.device.type in self._devices for t in _tensors(args, kwargs))


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def uploads(args: tuple[Any, ...]) -> bool:
    """Whether an indexing on a GPU takes something from the host; not if a mask is filled."""
    fills = any(i is not None and i.dtype in _MASKS for i in args[1])
    given = (*args[1], *(() if fills else args[2:3]))
    return args[0].is_cuda and any(t is not None and not t.is_cuda for t in given)


def depends_on_mask(args: tuple[Any, ...]) -> bool:
    """Whether an indexing counts the elements of a mask; filling with one value doesn't."""
    masks = [i for i in args[1] if i is not None and i.dtype in _MASKS]
    fills = len(args) > 2 and len(masks) == 1 == args[2].numel()
    return bool(masks) and not fills
