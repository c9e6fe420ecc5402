"""Settings for all tests, and the rule for tests marked `gpu` or `multi_gpu`.

Without a CUDA device, tests marked `gpu` are deselected, and without two those marked `multi_gpu`
(which are marked `gpu` as well): they are counted in the last line and are no skips, so a skip in a
report is always worth a look. Asking for them by name (`pytest -m gpu`) where there are too few
devices is a usage error, never a green run of nothing.
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

DEVICES_NEEDED = {"multi_gpu": 2, "gpu": 1}
"""By marker; the one that asks for more comes first, as its tests have the other one too."""


@pytest.hookimpl(trylast=True)  # after pytest's own -m and -k have made their selection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, needed in DEVICES_NEEDED.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if not marked or _num_devices() >= needed:
            continue
        if _names(config.option.markexpr, marker):
            raise pytest.UsageError(
                f"-m {config.option.markexpr!r} asks for {len(marked)} tests marked {marker}, "
                f"which need {needed} CUDA device(s), and {_num_devices()} are available. Run them "
                f"on another machine, or leave -m away: tests marked {marker} are then deselected."
            )
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


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
    if report.failed and item.get_closest_marker("gpu") and not _device_answers(item):
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


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _device_answers(item: pytest.Item) -> bool:
    import torch

    try:
        torch.cuda.synchronize()
        for index in range(2 if item.get_closest_marker("multi_gpu") else 0):
            torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    return True


def _names(markexpr: str, marker: str) -> bool:
    """Whether an expression names a marker; one that excludes it has left no such test."""
    return re.search(rf"\b{marker}\b", markexpr) is not None
