"""Additions and gates in the graph of a block, put at the end of the products before them.

Which product feeds which addition is read off the graph that Dynamo makes, in which linear layers
and activations are still whole. What isn't recognised there stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mmgraph.ops import can_add, can_gate, is_aligned

__all__ = ["move_into_products"]

_HALF = (torch.float16, torch.bfloat16)
_ADDITIONS = (operator.add, torch.add)
_PRODUCTS = (operator.mul, torch.mul)


def move_into_products(graph: fx.GraphModule) -> int:
    """Let products of a graph that Dynamo made end with the additions and gates after them.

    Returns:
        How many there were.
    """
    moved = 0
    for node in list(graph.graph.nodes):
        moved += _move_gate(node) or _move_addition(node)
    if moved:
        graph.graph.lint()
        graph.recompile()
    return moved


def _move_addition(node: Any) -> bool:
    if node.op != "call_function" or node.target not in _ADDITIONS or len(node.args) != 2:
        return False
    if node.kwargs:  # alpha, say
        return False
    for product, rows in (node.args, reversed(node.args)):
        linear = _linear_of(product)
        if linear is None or not isinstance(rows, fx.Node) or not _alike(product, rows):
            continue
        x, weight, bias = _arguments(linear)
        if not (_fits(x, weight, bias) and can_add(_value(weight).device)):
            continue
        _replace(node, torch.ops.mmgraph.linear_add.default, (x, weight, bias, rows))
        return True
    return False


def _move_gate(node: Any) -> bool:
    if node.op != "call_function" or node.target not in _PRODUCTS or len(node.args) != 2:
        return False
    for gate, up in (node.args, reversed(node.args)):
        if not _is_call(gate, F.silu) or len(gate.users) != 1:
            continue
        linear = _halved(gate.args[0], up)
        if linear is None:
            continue
        x, weight, bias = _arguments(linear)
        if not (_fits(x, weight, bias) and can_gate(_value(weight).device)):
            continue
        _replace(node, torch.ops.mmgraph.linear_swiglu.default, (x, weight, bias))
        return True
    return False


def _replace(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    node.graph.eliminate_dead_code()


def _linear_of(node: Any) -> Any:
    """The product that `node` is, but for steps that change nothing; nobody else reads it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if _is_call(node, F.linear):
            return node
        dropped = _is_call(node, F.dropout) and _dropout_is_off(node)
        whole = _is_call(node, operator.getitem) and _alike(node, node.args[0])
        if not dropped and not (whole and _takes_all(node.args[1])):
            return None
        node = node.args[0]
    return None


def _dropout_is_off(node: Any) -> bool:
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False))
    given.update(node.kwargs)
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
    return given["input"], given["weight"], given.get("bias")


def _fits(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the kernels take the matrices of a product."""
    tensors = [_value(node) for node in (x, weight, bias) if node is not None]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    rows = _value(weight).shape
    same = {tensor.dtype for tensor in tensors}
    return same <= set(_HALF) and len(same) == 1 and len(rows) == 2 and is_aligned(*map(int, rows))


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
