"""Additions and gates in the graph of a block, put at the end of the products before them.

Which product feeds which addition is read off the graph that Dynamo makes, in which linear layers
and activations are still whole. What isn't recognised there stays as it is.

What a reader would get wrong: such a graph isn't functional. Where anything in it writes to memory
that was there before, a product could be moved past what changes its input, so nothing is moved.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mmgraph.ops import can_add, can_gate, is_aligned

__all__ = ["move_into_products"]

_HALF = (torch.float16, torch.bfloat16)
_ADDITIONS = (operator.add, torch.add)
_PRODUCTS = (operator.mul, torch.mul)
_WALKED = (F.linear, F.silu, F.dropout, operator.getitem)
_WRITING_OPERATORS = frozenset(
    {operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat}
    | {operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod, operator.imul}
    | {operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv}
    | {operator.ixor}
)


def move_into_products(graph: fx.GraphModule) -> int:
    """Let products of a graph that Dynamo made end with the additions and gates after them.

    Returns:
        How many there were.
    """
    if any(map(_may_write, graph.graph.nodes)):
        return 0
    moved = 0
    for node in list(graph.graph.nodes):
        moved += _move_gate(node) or _move_addition(node)
    if moved:
        graph.graph.lint()
        graph.recompile()
    return moved


def _may_write(node: fx.Node) -> bool:
    """Whether a step may write to memory that was there before it."""
    target: Any = node.target
    if node.op == "call_method":
        return _writes_by_name(target)
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.HigherOrderOperator) or target in _WRITING_OPERATORS:
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    given = _given(node)
    return (
        _writes_by_name(getattr(target, "__name__", ""))
        or given.get("out") is not None
        or given.get("inplace", False) is not False
    )


def _writes_by_name(name: str) -> bool:
    """Whether PyTorch's names say so: ``mul_``, ``__imul__``, ``__setitem__``."""
    if name.startswith("__"):
        return name.startswith(("__i", "__set")) and name not in ("__invert__", "__index__")
    return name.endswith("_")


def _given(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, where a Python function has names for those given by position."""
    target: Any = node.target
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # built in
        names = []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _move_addition(node: fx.Node) -> bool:
    if not _has_two_operands(node, _ADDITIONS):
        return False
    for product, rows in _both_ways(node):
        linear = _linear_of(product)
        if linear is None or not isinstance(rows, fx.Node) or not _alike(product, rows):
            continue
        x, weight, bias = _arguments(linear)
        if not (_fits(linear, x, weight, bias) and can_add(_value(weight).device)):
            continue
        _replace(node, torch.ops.mmgraph.linear_add.default, (x, weight, bias, rows))
        return True
    return False


def _move_gate(node: fx.Node) -> bool:
    if not _has_two_operands(node, _PRODUCTS):
        return False
    for gate, up in _both_ways(node):
        if not _is_call(gate, F.silu) or len(gate.users) != 1 or len(gate.args) != 1:
            continue
        linear = _halved(gate.args[0], up)
        if linear is None:
            continue
        x, weight, bias = _arguments(linear)
        fits = _fits(linear, x, weight, bias) and is_aligned(_value(linear).shape[-1] // 2)
        if not (fits and can_gate(_value(weight).device)):
            continue
        _replace(node, torch.ops.mmgraph.linear_swiglu.default, (x, weight, bias))
        return True
    return False


def _has_two_operands(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    """Whether a node calls one of `targets` with two operands and nothing else, like ``alpha``."""
    is_call = node.op == "call_function" and node.target in targets
    return is_call and len(node.args) == 2 and not node.kwargs


def _both_ways(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    a, b = node.args
    yield a, b
    yield b, a


def _replace(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call in the place of `node`, and drop the steps that only led there."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    unused = [node]
    while unused:
        last = unused.pop()
        before = last.all_input_nodes
        last.graph.erase_node(last)
        unused += [n for n in before if not n.users and any(_is_call(n, w) for w in _WALKED)]


def _linear_of(node: Any) -> Any:
    """The product that `node` is, but for steps that change nothing; nobody else reads it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if _is_call(node, F.linear):
            return node
        if not node.args:
            return None
        dropped = _is_call(node, F.dropout) and _dropout_is_off(node)
        whole = _is_call(node, operator.getitem) and _alike(node, node.args[0])
        if not dropped and not (whole and _takes_all(node.args[1])):
            return None
        node = node.args[0]
    return None


def _dropout_is_off(node: fx.Node) -> bool:
    given = _given(node)
    return given.get("training", True) is False or given.get("p") == 0


def _takes_all(index: Any) -> bool:
    """Whether an index into a tensor, which keeps its shape, only consists of slices forward."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is Ellipsis or (isinstance(part, slice) and part.step in (None, 1)) for part in parts
    )


def _halved(first: Any, second: Any) -> Any:
    """The product whose halves these are, the first one first; nobody else reads them."""
    if not (_is_call(first, operator.getitem) and _is_call(second, operator.getitem)):
        return None
    linear = first.args[0]
    if second.args[0] is not linear or not _is_call(linear, F.linear) or len(linear.users) != 2:
        return None
    if len(first.users) != 1 or len(second.users) != 1:
        return None
    width = int(_value(linear).shape[-1])
    spans = [_last_span(node.args[1], width) for node in (first, second)]
    return linear if spans == [(0, width // 2), (width // 2, width)] and width % 2 == 0 else None


def _last_span(index: Any, width: int) -> tuple[int, int] | None:
    """What ``[..., a:b]`` takes of the last dimension."""
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis):
        return None
    part = index[1]
    if not isinstance(part, slice) or part.step not in (None, 1):
        return None
    ends = (0 if part.start is None else part.start, width if part.stop is None else part.stop)
    return ends if all(isinstance(end, int) for end in ends) else None


def _arguments(linear: fx.Node) -> tuple[Any, Any, Any]:
    given = dict(zip(("input", "weight", "bias"), linear.args, strict=False))
    given.update(linear.kwargs)
    return given.get("input"), given.get("weight"), given.get("bias")


def _fits(linear: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Whether the kernels take the matrices of a product."""
    tensors = [_value(node) for node in (linear, x, weight, bias) if node is not None]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    dtypes = {tensor.dtype for tensor in tensors}  # under autocast they differ
    if len(dtypes) != 1 or not dtypes <= set(_HALF):
        return False
    matrix = _value(weight)
    rows_lie_together = matrix.dim() == 2 and matrix.stride(1) == 1
    if not rows_lie_together or not is_aligned(*map(int, (*matrix.shape, matrix.stride(0)))):
        return False
    vector = None if bias is None else _value(bias)
    return vector is None or (tuple(vector.shape) == (matrix.shape[0],) and vector.stride(0) == 1)


def _alike(a: Any, b: Any) -> bool:
    """Whether two tensors have one shape and dtype."""
    first, second = _value(a), _value(b)
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    # As text: comparing sizes that aren't known would bake the answer into the code.
    return first.dtype == second.dtype and str(first.shape) == str(second.shape)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target
