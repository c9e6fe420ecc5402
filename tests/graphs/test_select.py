"""Which backend serves which device."""

from __future__ import annotations

import pytest
import torch

from mmgraph import ConfigError
from mmgraph.graphs import select_backend
from mmgraph.graphs.cuda import CudaBackend
from mmgraph.graphs.trace import TraceBackend


@pytest.mark.parametrize("name", ["auto", "trace"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_gpu_calls_are_traced(name: str, device: str) -> None:
    backend = select_backend(name, torch.device(device))
    assert isinstance(backend, TraceBackend)
    assert backend.name == "trace"


def test_each_selection_is_a_backend_of_its_own() -> None:
    assert select_backend("trace", torch.device("cpu")) is not select_backend(
        "trace", torch.device("cpu")
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_graphs_of_cuda_need_a_cuda_device(device: str) -> None:
    message = (
        f"backend='cuda' needs an encoder on a CUDA device, got one on {device}: move the model, "
        "or use backend='trace'"
    )
    with pytest.raises(ConfigError, match=message):
        select_backend("cuda", torch.device(device))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, cuda, trace, got 'cudagraph'"):
        select_backend("cudagraph", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind"), [("auto", CudaBackend), ("cuda", CudaBackend), ("trace", TraceBackend)]
)
def test_on_a_gpu_graphs_are_the_default_and_tracing_a_choice(name: str, kind: type) -> None:
    assert type(select_backend(name, torch.device("cuda"))) is kind
