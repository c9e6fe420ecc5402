"""Settings of the registry: models are shared, and what comes out can be written to a file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.registry.record import Recorder
from tests.registry.subject import Subjects


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--registry-results",
        metavar="FILE",
        default=None,
        help="write what came out of each entry of tests/registry, for scripts.models_table; with "
        "pytest-xdist each worker writes a file of its own beside this one",
    )


@pytest.fixture(scope="session")
def subjects() -> Subjects:
    return Subjects()


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    path = request.config.getoption("--registry-results", default=None)
    recorder = Recorder(path, os.environ.get("PYTEST_XDIST_WORKER"))
    yield recorder
    recorder.save()


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Models as small as these are done before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def float32_is_float32() -> Iterator[None]:
    """The twin that judges bfloat16 must not run its convolutions in TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def any_graph_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two is faster hangs on the machine, and isn't what these tests ask."""
    monkeypatch.setattr("mmgraph.graphs.cuda.CudaBackend.is_timed", False)
