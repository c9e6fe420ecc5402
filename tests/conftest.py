"""Settings for all tests, and the rule for tests marked `gpu`.

Without a CUDA device, tests marked `gpu` are deselected: they are counted in the last line and are
no skips, so a skip in a report is always worth a look. Asking for them by name (`pytest -m gpu`)
where there is no device is a usage error, never a green run of nothing.
"""

import os

# Read once, when transformers and huggingface_hub are imported: tests never touch the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

if "PYTEST_XDIST_WORKER" in os.environ:  # as many compilers as there are workers are enough
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import re
import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(trylast=True)  # after pytest's own -m and -k have made their selection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _cuda_is_available():
        return
    if _names_gpu(config.option.markexpr):
        raise pytest.UsageError(
            f"-m {config.option.markexpr!r} asks for {len(gpu_items)} tests that need a CUDA "
            "device, and torch.cuda.is_available() is False. Run them on a machine with a GPU, or "
            "leave -m away: tests marked gpu are then deselected."
        )
    config.hook.pytest_deselected(items=gpu_items)
    items[:] = [item for item in items if item not in gpu_items]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what failed to the file that ``MMGRAPH_TEST_FAILURES`` names, at once.

    A run that is cut off, as on a machine that is lent for minutes, has said nothing otherwise.
    """
    path = os.environ.get("MMGRAPH_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-6000:]}\n\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ends a process that has lost its device, and says which test lost it.

    After a device-side assert or an illegal access every later call of CUDA fails, so each test
    that followed would be reported as failed for a fault that isn't its own. With pytest-xdist
    the worker is replaced and the other tests go on.
    """
    report = yield
    if report.failed and item.get_closest_marker("gpu") and not _device_answers():
        print(f"\n{item.nodeid} lost the device:\n{report.longreprtext}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(70)
    return report


@pytest.fixture(autouse=True)
def any_graph_is_fast_enough(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of two is faster hangs on the machine and on the tests beside this one.

    A test that asks for it is marked `timed`.
    """
    if request.node.get_closest_marker("gpu") and not request.node.get_closest_marker("timed"):
        monkeypatch.setattr("mmgraph.graphs.cuda.CudaBackend.is_timed", False)


@pytest.fixture(scope="session", autouse=True)
def two_torch_threads() -> None:
    """The same thread count everywhere: it decides how sums are split, so the last bits too."""
    import torch

    torch.set_num_threads(2)


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def _device_answers() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _names_gpu(markexpr: str) -> bool:
    """Whether an expression names the marker; one that excludes it has left no such test."""
    return re.search(r"\bgpu\b", markexpr) is not None
