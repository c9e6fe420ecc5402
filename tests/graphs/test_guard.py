"""The guard finds what a CUDA graph can't hold, and lets everything else pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mmgraph import CaptureError
from mmgraph.graphs.cuda import CudaBackend
from mmgraph.graphs.guard import CaptureGuard

Operation = Callable[[torch.Tensor, torch.Tensor], Any]
"""Of floats (4,) and of small integers (4,)."""


def assign(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    x = x.clone()
    x[mask] = value
    return x


HOST_READS: dict[str, Operation] = {
    "item": lambda x, i: x[0].item(),
    "float": lambda x, i: float(x.sum()),
    "bool": lambda x, i: bool(x[0] > 0),
    "is_nonzero": lambda x, i: torch.is_nonzero(x[0]),
    "index with a tensor of no dimension": lambda x, i: x[i[0]],
    "slice by a tensor": lambda x, i: x[: i[0]],
    "equal": lambda x, i: torch.equal(x, x),
    "nonzero": lambda x, i: x.nonzero(),
    "where": lambda x, i: torch.where(x > 0),
    "argwhere": lambda x, i: torch.argwhere(x),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "unique": lambda x, i: i.unique(),
    "unique with counts": lambda x, i: i.unique(return_counts=True),
    "unique_consecutive": lambda x, i: i.unique_consecutive(),
    "unique of a dimension": lambda x, i: i[None].unique(dim=1),
    "bincount": lambda x, i: i.bincount(),
    "one_hot of unknown classes": lambda x, i: torch.nn.functional.one_hot(i),
    "repeats": lambda x, i: x.repeat_interleave(i),
}
MASKS: dict[str, Operation] = {
    "select by mask": lambda x, i: x[x > 0],
    "select by a mask and an index": lambda x, i: x.expand(2, 4)[i[:1] * 0, x > 0],
    "assign as many as the mask has": lambda x, i: assign(x, x > 0, x[:2]),
    "index_put by mask": lambda x, i: x.index_put((x > 0,), x[:2]),
}
COPIES: dict[str, Operation] = {
    "to the host": lambda x, i: x.cpu(),
    "tolist": lambda x, i: x.tolist(),
    "to the host in another dtype": lambda x, i: x.to("cpu", torch.float64),
    "to the device": lambda x, i: torch.ones(4).to(x.device),
    "copy_ to the host": lambda x, i: torch.ones(4).copy_(x),
    "copy_ to the device": lambda x, i: x.clone().copy_(torch.ones(4)),
}
POSITIONS: dict[str, Operation] = {
    "index": lambda x, i: x[torch.tensor([0, 2])],
    "assign": lambda x, i: assign(x, torch.tensor([0, 2]), x[:2]),
    "assign a number": lambda x, i: assign(x, i, 1.0),
}
ALLOWED: dict[str, Operation] = {
    "arithmetic": lambda x, i: (x * 2 + 1).softmax(0),
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.index_put((i,), x),
    "fill by mask": lambda x, i: assign(x, x > 0, 0.0),
    "masked_fill": lambda x, i: x.masked_fill(x > 0, 0.0),
    "choose by mask": lambda x, i: torch.where(x > 0, x, -x),
    "repeats of a known total": lambda x, i: x.repeat_interleave(i, output_size=4),
    "another dtype": lambda x, i: x.to(torch.float64),
    "copy_ on the device": lambda x, i: x.clone().copy_(x * 2),
    "new on the device": lambda x, i: torch.arange(4, device=x.device),
    "host tensors alone": lambda x, i: x * torch.ones(4).sum().item(),
    "sorting": lambda x, i: x.sort(),
    "cumulative": lambda x, i: i.cumsum(0),
}
EVERYTHING = {**HOST_READS, **MASKS, **COPIES, **ALLOWED}


def operands(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of the floats are above zero; the integers sum to 4."""
    return (
        torch.tensor([1.0, -1.0, 2.0, -2.0], device=device),
        torch.tensor([1, 2, 0, 1], device=device),
    )


@pytest.mark.parametrize("name", EVERYTHING)
def test_on_the_host_everything_passes(name: str) -> None:
    x, i = operands("cpu")
    for inference in (False, True):
        with torch.inference_mode(inference), CaptureGuard():
            guarded = EVERYTHING[name](x, i)
        torch.testing.assert_close(guarded, EVERYTHING[name](x, i))


def test_a_refusal_leaves_no_mode_behind() -> None:
    with pytest.raises(ValueError, match="x"), CaptureGuard():
        raise ValueError("x")
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (HOST_READS, "it reads data on the host, at aten"),
        (MASKS, "the shape of a result depends on data, at aten"),
        (COPIES, "it copies between host and device, at aten"),
        (POSITIONS, "it uploads positions or values from the host, at aten"),
    ],
    ids=["host reads", "masks", "copies", "positions"],
)
def test_what_breaks_a_capture_is_refused(operations: dict[str, Operation], message: str) -> None:
    x, i = operands("cuda")
    for name, operation in operations.items():
        operation(x, i)  # it is no error elsewhere
        for inference in (False, True):
            with (
                pytest.raises(CaptureError) as caught,
                torch.inference_mode(inference),
                CaptureGuard(),
            ):
                operation(x, i)
            assert str(caught.value).startswith(message), name


@pytest.mark.gpu
@pytest.mark.parametrize("value", [1.0, [1.0, 2.0]])
def test_a_constant_of_the_host_is_refused(value: object) -> None:
    """The constructor copies with dispatch modes switched off, but hands on what it made."""
    torch.tensor(value, device="cuda")
    with pytest.raises(CaptureError, match="from numbers on the host"), CaptureGuard():
        torch.tensor(value, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_capture_can_hold_passes_and_is_captured(name: str) -> None:
    x, i = operands("cuda")
    for inference in (False, True):
        with torch.inference_mode(inference), CaptureGuard():
            ALLOWED[name](x, i)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        ALLOWED[name](x, i)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "operation",
    [
        # only a value on the host makes this a fill without counting the mask
        pytest.param(lambda x, i: assign(x, x > 0, x.sum()), id="assign a tensor by mask"),
        # the kernel takes the value by .item()
        pytest.param(lambda x, i: x.masked_fill(x > 0, x.sum()), id="masked_fill by a tensor"),
        # isclose(...).all().item() below the dispatcher
        pytest.param(lambda x, i: torch.allclose(x, x), id="allclose"),
    ],
)
def test_what_hides_below_the_dispatcher_is_refused_by_the_capture_itself(
    operation: Operation,
) -> None:
    x, i = operands("cuda")

    def run(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        operation(buffers["x"], buffers["i"])
        return [buffers["x"] * 2]

    backend = CudaBackend(torch.device("cuda"))
    with pytest.raises(CaptureError, match="the capture failed"):
        backend.capture(run, {"x": x, "i": i})
    graph = backend.capture(lambda buffers: [buffers["x"] * 2], {"x": x})
    assert torch.equal(graph.replay()[0], x * 2)
