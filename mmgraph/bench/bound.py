"""The practical bound: how long the products and the attention of a call take, and nothing else.

All matrix products of the tower at the sizes of the call, each with its layer's own weights, and
for each attention the fastest kernel that there is, in one graph. What lies between them (norms,
activations, rotations, additions) takes no time here, and no result is passed on. A tower that is
run from these kernels can't be faster; one that gets close has nothing to gain but better kernels.

Widths that tensor cores don't like are padded as mmgraph pads them, and layers that take the same
input are one product where that is faster, because the bound is to be that of the work, not of its
layout. Products are cuBLAS's or, where quack is installed and measured to be faster, quack's.
Operations are counted by the tower's own widths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from mmgraph.bench.attention import Fastest, fastest_attention
from mmgraph.bench.handmade import captured, lean_call, microseconds
from mmgraph.bench.recording import RECORDING_ATTENTION, record, register_recording_attention
from mmgraph.bench.records import AttentionTimes, Bound
from mmgraph.bench.sizes import CallSize
from mmgraph.bench.subject import Inputs, Subject
from mmgraph.bench.timing import Call
from mmgraph.bench.workload import Attention, Matmul, Product, Workload
from mmgraph.ops import is_aligned, other_product

__all__ = ["PracticalBound", "aligned", "measure_bound", "workload_of"]

_WANTED_BYTES = 16
_MULTIPLE = 64
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class PracticalBound:
    """What runs the bound.

    Attributes:
        call: One call's worth of products and attention, from a graph on CUDA.
        facts: What it consists of.
    """

    call: Call
    facts: Bound


def workload_of(subject: Subject, size: CallSize, inputs: Inputs) -> Workload:
    """Watch one call of the tower in eager mode."""
    register_recording_attention()
    return record(lean_call(subject, size, inputs, subject.twin(), RECORDING_ATTENTION))


def measure_bound(workload: Workload, device: torch.device) -> PracticalBound:
    """Choose kernels for `workload` and make them one graph; without CUDA they are just called."""
    kernels = {op: fastest_attention(op, device) for op in dict.fromkeys(workload.attention)}
    products = _Products(device)
    steps: list[Call] = []
    for op in workload.operations:
        steps += [kernels[op].run] if isinstance(op, Attention) else products(op)
    call = captured(device, partial(_run, steps))
    run = len(steps) - len(workload.attention)
    return PracticalBound(call, _facts(workload, kernels, run, products.num_other))


def aligned(size: int, element_size: int) -> int:
    """Width that mmgraph pads `size` elements to, so that a row is a multiple of 16 bytes."""
    if size * element_size % _WANTED_BYTES == 0:
        return size
    return -(-size // _MULTIPLE) * _MULTIPLE


class _Inputs:
    """Random tensors, one for each shape: the output of the layer before is in the cache, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if (shape, dtype) not in self._tensors:
            tensor = torch.randn(shape, device=self._device, dtype=dtype)
            self._tensors[shape, dtype] = tensor
        return self._tensors[shape, dtype]


class _Products:
    """Makes matrix products; those of one input are one where that is measured to be faster."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = _Inputs(device)
        self._together: dict[Hashable, bool] = {}
        self._other: dict[Hashable, bool] = {}
        self._kernel = other_product(device)
        self.num_other = 0
        """How many aren't cuBLAS's."""

    def __call__(self, operation: Product | Matmul) -> list[Call]:
        """What computes `operation`, in order."""
        if isinstance(operation, Matmul):
            pair = [self._inputs(s, operation.dtype) for s in (operation.left, operation.right)]
            return [partial(torch.matmul, *pair)]
        weights = [_aligned_weight(weight) for weight in operation.weights]
        x = self._inputs((operation.rows, weights[0].shape[1]), weights[0].dtype)
        apart = [self._fastest(x, weight) for weight in weights]
        chosen = apart
        if len(apart) > 1:
            together = [self._fastest(x, torch.cat(weights))]
            shapes = (x.shape, *(weight.shape for weight in weights))
            if shapes not in self._together:
                one, many = (
                    microseconds(partial(_run, c), self._device) for c in (together, apart)
                )
                self._together[shapes] = one < many
            chosen = together if self._together[shapes] else apart
        self.num_other += sum(call.func is not F.linear for call in chosen)
        return list(chosen)

    def _fastest(self, x: torch.Tensor, weight: torch.Tensor) -> partial[torch.Tensor]:
        """The product of one weight by what is faster for its shape."""
        usual = partial(F.linear, x, weight)
        if self._kernel is None or x.dtype not in _HALF or not is_aligned(*weight.shape):
            return usual
        other, shapes = partial(self._kernel, x, weight), (x.shape, weight.shape, x.dtype)
        if shapes not in self._other:
            times = [microseconds(call, self._device) for call in (usual, other)]
            self._other[shapes] = times[1] < times[0]
        return other if self._other[shapes] else usual


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _aligned_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where its widths are fine, else a padded copy."""
    weight = weight.detach()
    rows, columns = (aligned(n, weight.element_size()) for n in weight.shape)
    if (rows, columns) == tuple(weight.shape):
        return weight.contiguous()
    padded = weight.new_zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def _facts(
    workload: Workload,
    kernels: Mapping[Attention, Fastest],
    products_run: int,
    products_other: int,
) -> Bound:
    calls = Counter(workload.attention)
    return Bound(
        products=sum(_layers(op) for op in workload.products),
        products_run=products_run,
        products_other=products_other,
        product_flops=sum(op.flops for op in workload.products),
        attention_flops=sum(op.flops for op in workload.attention),
        attention=tuple(
            AttentionTimes(
                shape=_describe(attention),
                calls=calls[attention],
                flops=attention.flops,
                fastest=kernel.name,
                microseconds=kernel.microseconds,
                failed=kernel.failed,
            )
            for attention, kernel in kernels.items()
        ),
    )


def _layers(operation: Product | Matmul) -> int:
    return len(operation.weights) if isinstance(operation, Product) else 1


def _describe(attention: Attention) -> str:
    segments = Counter(attention.queries)
    lengths = " + ".join(f"{count} x {length}" for length, count in segments.items())
    text = f"{lengths} rows, {attention.heads} heads of {attention.head_dim}"
    if attention.keys != attention.queries:
        text += f", {sum(attention.keys)} keys"
    return text + (", masked" if attention.mask is not None or attention.causal else "")
