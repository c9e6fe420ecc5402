"""Linear layers whose widths tensor cores don't like, on padded weights.

A matrix whose rows aren't a multiple of 16 bytes makes cuBLAS take kernels that load one element at
a time (3,420 columns of bfloat16 in Qwen2.5-VL's MLP: half of the tower's time). So the weight
lives in a larger, zero-filled storage, and the user's parameter is a view of it: there is no
second copy, and in-place updates, ``state_dict`` and ``save_pretrained`` work as before. While a
graph is recorded the layer multiplies the whole storage: zero columns meet zero inputs, and
surplus outputs are cut off, which the operations around fold into their own loads and stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["AlignedWeights"]

_WANTED_BYTES = 16
_MULTIPLE = 64
_MIN_FEATURES = 256


class AlignedLinear(nn.Linear):
    """A linear layer that multiplies its padded weight; a layer is one for the time of a capture.

    A class rather than a function on the instance: compilers share code between layers of a class.
    """

    _padded_weight: torch.Tensor
    _padded_bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self._padded_weight.shape[1] - self.in_features
        if extra:
            x = F.pad(x, (0, extra))
        return F.linear(x, self._padded_weight, self._padded_bias)[..., : self.out_features]


@dataclass(eq=False)
class _Storage:
    """Padded memory, and how many towers use it."""

    tensor: torch.Tensor
    users: int = 0


_storages: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
"""Padded memory that is in use, by address."""


@dataclass(frozen=True, slots=True)
class _Padded:
    weight: _Storage
    bias: _Storage | None


class AlignedWeights:
    """The padded weights of a tower.

    Args:
        module: The tower; its misaligned weights move into padded storage at once.
    """

    def __init__(self, module: nn.Module) -> None:
        tied = _tied_parameters(module)
        self._layers = {
            layer: _pad(layer)
            for layer in module.modules()
            if type(layer) is nn.Linear
            and _is_misaligned(layer)
            and not any(id(p) in tied for p in layer.parameters())
        }

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def widths(self) -> dict[int, int]:
        """Width before and after."""
        return {
            before: after
            for layer, padded in self._layers.items()
            for before, after in zip(layer.weight.shape, padded.weight.tensor.shape, strict=True)
            if before != after
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the layers multiply their padded weights."""
        ours = {layer: p for layer, p in self._layers.items() if _is_ours(layer, p)}
        try:
            for layer, padded in ours.items():
                layer.__dict__["_padded_weight"] = padded.weight.tensor
                layer.__dict__["_padded_bias"] = (
                    layer.bias if padded.bias is None else padded.bias.tensor
                )
                layer.__class__ = AlignedLinear
            yield
        finally:
            for layer in ours:
                layer.__class__ = nn.Linear
                for name in ("_padded_weight", "_padded_bias"):
                    layer.__dict__.pop(name, None)

    def undo(self) -> None:
        """Give every layer parameters of their own size again."""
        for layer, padded in self._layers.items():
            _release(layer.weight, padded.weight)
            if layer.bias is not None and padded.bias is not None:
                _release(layer.bias, padded.bias)
        self._layers.clear()


def _is_ours(layer: nn.Linear, padded: _Padded) -> bool:
    """Whether a layer still has the parameters that were padded; somebody may have set others."""
    return (
        type(layer) is nn.Linear
        and _is_view(layer.weight, padded.weight)
        and (padded.bias is None or (layer.bias is not None and _is_view(layer.bias, padded.bias)))
    )


def _is_view(parameter: torch.Tensor, storage: _Storage) -> bool:
    tensor = storage.tensor
    return parameter.data_ptr() == tensor.data_ptr() and parameter.dtype == tensor.dtype


def _is_misaligned(layer: nn.Linear) -> bool:
    sizes, element = layer.weight.shape, layer.weight.element_size()
    return min(sizes) >= _MIN_FEATURES and any(n * element % _WANTED_BYTES for n in sizes)


def _pad(layer: nn.Linear) -> _Padded:
    """Move the parameters of `layer` into zero-filled storage of aligned sizes."""
    weight, bias = layer.weight, layer.bias
    rows, columns = (_aligned(n, weight.element_size()) for n in weight.shape)
    padded = _moved(weight, (rows, columns))
    return _Padded(padded, None if bias is None or rows == bias.shape[0] else _moved(bias, (rows,)))


def _moved(parameter: torch.Tensor, shape: tuple[int, ...]) -> _Storage:
    """Make `parameter` a view of the first entries of a larger tensor, and return that.

    A parameter that two towers share may be such a view already.
    """
    storage = _storages.get(parameter.data_ptr())
    if storage is None or storage.tensor.shape != shape or not _is_view(parameter, storage):
        with torch.inference_mode(False), torch.no_grad():  # in this order
            padded = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            view = padded[tuple(slice(n) for n in parameter.shape)]
            view.copy_(parameter)
            parameter.data = view
        storage = _storages[padded.data_ptr()] = _Storage(padded)
    storage.users += 1
    return storage


def _release(parameter: torch.Tensor, storage: _Storage) -> None:
    """Give `parameter` memory of its own size again, once no tower needs the other."""
    storage.users -= 1
    if storage.users == 0 and _is_view(parameter, storage):  # or somebody has replaced it
        with torch.inference_mode(False), torch.no_grad():  # in this order
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _aligned(size: int, element: int) -> int:
    return size if size * element % _WANTED_BYTES == 0 else -(-size // _MULTIPLE) * _MULTIPLE


def _tied_parameters(module: nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    counts = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return {parameter for parameter, count in counts.items() if count > 1}
