"""Linear layers on storage of our own, in which their products are fast.

Two things cost a tower's matrix products time. A matrix whose rows aren't a multiple of 16 bytes
makes cuBLAS take kernels that load one element at a time (3,420 columns of bfloat16 in
Qwen2.5-VL's MLP: half of the tower's time). And layers that read the same input (gate and up of an
MLP; query, key and value) are several small products where one would fill the chip.

So such weights live in larger, zero-filled storage, layers that read the same input side by side,
and the user's parameters are views of it: there is no second copy, and in-place updates,
``state_dict`` and ``save_pretrained`` work as before. While a graph is recorded a layer multiplies
the whole storage. Zero columns meet zero inputs. Surplus outputs are cut off, unless all that is
done to them is shown not to mind: cutting and padding costs as much as the activation itself.

What a reader would get wrong: which layers read the same input is a guess by their names, and only
time hangs on it. A layer that gets another input than its neighbour multiplies its own weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from mmgraph.preparation.storage import Storage, is_plain_linear, move_into, release

__all__ = ["AlignedWeights"]

_WANTED_BYTES = 16
_MULTIPLE = 64
_MIN_FEATURES = 256
_NEIGHBOURS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
)


class _Product:
    """One matrix product for one or more layers.

    Attributes:
        layers: The layers, in the order in which they are called.
        weight: Storage (rows of all, columns) of their weights.
        bias: Storage (rows of all,) of their biases, or ``None`` where that is needless.
        starts: First row of each.
        rows: Rows of each that are computed; the others of its output are cut off.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        first = layers[0].weight
        element, columns = first.element_size(), _aligned(first.shape[1], first.element_size())
        sizes = [_aligned(layer.out_features, element) for layer in layers]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.rows = [layer.out_features for layer in layers]
        self.weight = move_into([p.weight for p in layers], self.starts, (sum(sizes), columns))
        biases: list[torch.Tensor | None] = [layer.bias for layer in layers]
        exact = len(layers) == 1 and sizes == self.rows
        self.bias: Storage | None = None
        if not exact and any(bias is not None for bias in biases):
            self.bias = move_into(biases, self.starts, (sum(sizes),))
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    @property
    def widths(self) -> dict[int, int]:
        """Width before and after, of those that were padded."""
        columns = self.weight.tensor.shape[1]
        ends = (*self.starts[1:], self.weight.tensor.shape[0])
        pairs = [(layer.in_features, columns) for layer in self.layers]
        spans = zip(self.layers, self.starts, ends, strict=True)
        pairs += [(layer.out_features, end - start) for layer, start, end in spans]
        return {before: after for before, after in pairs if before != after}

    def span(self, index: int) -> int:
        """Rows of a layer with those that pad it."""
        ends = (*self.starts[1:], self.weight.tensor.shape[0])
        return ends[index] - self.starts[index]

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What the layer at `index` makes of `x`."""
        layer, start = self.layers[index], self.starts[index]
        if len(self.layers) == 1:
            bias: torch.Tensor | None = layer.bias if self.bias is None else self.bias.tensor
            return F.linear(self._padded(x), self.weight.tensor, bias)[..., : self.rows[0]]
        if index == 0:
            bias = None if self.bias is None else self.bias.tensor
            self._input, self._output = x, F.linear(self._padded(x), self.weight.tensor, bias)
        output = self._output
        if x is not self._input or output is None:
            alone = F.linear(x, layer.weight, layer.bias)
            return F.pad(alone, (0, self.rows[index] - layer.out_features))
        if index == len(self.layers) - 1:
            self.forget()
        return output[..., start : start + self.rows[index]]

    def forget(self) -> None:
        """Let go of the call before."""
        self._input = self._output = None

    def is_ours(self) -> bool:
        """Whether the layers still have the parameters that were moved."""
        return all(
            type(layer) is nn.Linear
            and self.weight.holds(layer.weight, start)
            and (self.bias is None or layer.bias is None or self.bias.holds(layer.bias, start))
            for layer, start in zip(self.layers, self.starts, strict=True)
        )

    def undo(self) -> None:
        """Give the layers parameters of their own size again."""
        release([layer.weight for layer in self.layers], self.starts, self.weight)
        if self.bias is not None:
            release([layer.bias for layer in self.layers], self.starts, self.bias)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.weight.tensor.shape[1] - x.shape[-1]
        return F.pad(x, (0, extra)) if extra else x


class AlignedLinear(nn.Linear):
    """A linear layer for the time of a capture, while its product is ours.

    A class rather than a function on the instance: compilers share code between layers of a class.
    """

    _product: _Product
    _index: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.output(self._index, x)


class AlignedWeights:
    """The weights of a tower that are on storage of our own.

    Args:
        module: The tower; its weights move at once.
        pad: Whether misaligned weights are padded.
        merge: Whether layers that read the same input are merged.
    """

    def __init__(self, module: nn.Module, *, pad: bool = True, merge: bool = False) -> None:
        tied = _tied_parameters(module)
        groups: list[list[nn.Linear]] = []
        grouped: set[nn.Module] = set()
        for parent in module.modules() if merge else ():
            group = _neighbours(parent)
            free = not any(id(p) in tied for layer in group for p in layer.parameters())
            if group and free and (pad or not any(map(_is_misaligned, group))):
                groups.append(group)
                grouped.update(group)
        groups += [
            [layer]
            for layer in (module.modules() if pad else ())
            if is_plain_linear(layer)
            and layer not in grouped
            and _is_misaligned(layer)
            and not any(id(p) in tied for p in layer.parameters())
        ]
        self._products: list[_Product] = []
        self._families: list[_Family] = []
        """Products that count on each other's width."""
        try:
            for group in groups:
                self._products.append(_Product(group))
            self._families += _widen(module, self._products)
        except BaseException:  # out of memory, say
            self.undo()
            raise

    def __len__(self) -> int:
        return sum(len(product.layers) for product in self._products if product.widths)

    @property
    def layers(self) -> frozenset[nn.Module]:
        """The layers whose weights moved."""
        return frozenset(layer for product in self._products for layer in product.layers)

    @property
    def num_merged(self) -> int:
        """Layers that share a product with others."""
        return sum(len(p.layers) for p in self._products if len(p.layers) > 1)

    @property
    def widths(self) -> dict[int, int]:
        """Width before and after, of layers that were padded."""
        return {a: b for product in self._products for a, b in product.widths.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the layers multiply their storage."""
        broken = {p for p in self._products if not p.is_ours()}
        for family in self._families:
            if broken & family.products or not family.is_as_found:
                broken |= family.products
        with _applied([product for product in self._products if product not in broken]):
            yield

    def undo(self) -> None:
        """Give every layer parameters of their own size again."""
        for product in self._products:
            product.undo()
        self._products.clear()
        self._families.clear()


@contextmanager
def _applied(products: Sequence[_Product]) -> Iterator[None]:
    layers = [(product, i, layer) for product in products for i, layer in enumerate(product.layers)]
    try:
        for product, i, layer in layers:
            layer.__dict__["_product"], layer.__dict__["_index"] = product, i
            layer.__class__ = AlignedLinear
        yield
    finally:
        for product, _, layer in layers:
            product.forget()
            layer.__class__ = nn.Linear
            for name in ("_product", "_index"):
                layer.__dict__.pop(name, None)


def _neighbours(parent: nn.Module) -> list[nn.Linear]:
    """Children that read the same input, to judge by their names."""
    for names in _NEIGHBOURS:
        layers = [getattr(parent, name, None) for name in names]
        found = [layer for layer in layers if is_plain_linear(layer)]
        if len(set(found)) == len(names) and len({_kind(layer) for layer in found}) == 1:
            return found if all(min(layer.weight.shape) >= _MIN_FEATURES for layer in found) else []
    return []


def _kind(layer: nn.Linear) -> tuple[Any, ...]:
    weight = layer.weight
    return (type(weight), weight.shape[1], weight.dtype, weight.device, weight.is_contiguous())


class _Family(NamedTuple):
    """Products of the layers of one module, each of which counts on the width of the others."""

    products: frozenset[_Product]
    parent: nn.Module
    children: tuple[nn.Module, ...]

    @property
    def is_as_found(self) -> bool:
        """Whether the module still consists of what it was tried out with; adapters may come."""
        return tuple(self.parent.children()) == self.children


def _widen(module: nn.Module, products: Sequence[_Product]) -> list[_Family]:
    """Leave surplus outputs on where all that is done to them is shown not to mind."""
    families: list[_Family] = []
    places = {layer: (p, i) for p in products for i, layer in enumerate(p.layers)}
    for parent in module.modules():
        children = [child for child in parent.children() if child in places]
        padded = [c for c in children if places[c][0].span(places[c][1]) != c.out_features]
        if not padded or parent.training or any(_is_hooked(m) for m in parent.modules()):
            continue
        narrow = _outcome(parent, products, padded[0])
        for child in padded:
            product, i = places[child]
            product.rows[i] = product.span(i)
        wide = _outcome(parent, products, padded[0])
        if narrow is not None and wide is not None and _same(narrow, wide):
            concerned = frozenset(places[child][0] for child in children)
            families.append(_Family(concerned, parent, tuple(parent.children())))
            continue
        for child in padded:
            product, i = places[child]
            product.rows[i] = child.out_features
    return families


@torch.no_grad()
def _outcome(
    parent: nn.Module, products: Sequence[_Product], reader: nn.Module
) -> torch.Tensor | None:
    """What a module makes of some random rows; ``None`` if it takes other arguments."""
    assert isinstance(reader, nn.Linear)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, reader.in_features, generator=generator).to(reader.weight)
    concerned = [p for p in products if any(layer in p.layers for layer in parent.children())]
    try:
        with _applied(concerned):
            output = parent.forward(rows)
    except Exception:  # whatever it wants, it isn't this
        return None
    return output if isinstance(output, torch.Tensor) else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by no more than the last bits of some terms of their sums."""
    if a.shape != b.shape:
        return False
    tolerance = max(torch.finfo(a.dtype).eps / 4, 1e-6)
    a, b = a.double(), b.double()
    return float((a - b).norm()) <= tolerance * float(a.norm())


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_misaligned(layer: nn.Linear) -> bool:
    sizes, element = layer.weight.shape, layer.weight.element_size()
    return min(sizes) >= _MIN_FEATURES and any(n * element % _WANTED_BYTES for n in sizes)


def _aligned(size: int, element: int) -> int:
    return size if size * element % _WANTED_BYTES == 0 else -(-size // _MULTIPLE) * _MULTIPLE


def _tied_parameters(module: nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    counts = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return {parameter for parameter, count in counts.items() if count > 1}
