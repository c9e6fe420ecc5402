"""Where a benchmark ran: a number without its machine, versions and commit means nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import mmgraph

__all__ = ["Environment"]

_TIMEOUT_S = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Machine and software.

    Attributes:
        gpu: Name of the GPU, or ``None`` for a run on the CPU.
        driver: Version of its driver, where nvidia-smi tells.
        cpu: Name of the processor.
        cpu_count: Logical processors that this process may use.
        platform: Operating system.
        versions: By package; "cuda" is what torch was built for.
        commit: Git commit of the checkout that mmgraph ran from, if it did.
        dirty: Whether that checkout held anything that isn't committed.
    """

    gpu: str | None
    driver: str | None
    cpu: str
    cpu_count: int
    platform: str
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None

    @classmethod
    def read(cls, device: torch.device, commit: str | None = None) -> Environment:
        """Describe this process as it runs on `device`.

        `commit`, or ``MMGRAPH_COMMIT`` in the environment, is for a tree that came without its
        history, or with somebody else's.
        """
        cuda = device.type == "cuda"
        commit, dirty = commit or os.environ.get("MMGRAPH_COMMIT"), None
        if commit is None:
            commit, dirty = _checkout()
        return cls(
            gpu=torch.cuda.get_device_name(device) if cuda else None,
            driver=_driver() if cuda else None,
            cpu=_cpu_name(),
            cpu_count=_cpu_count(),
            platform=platform.platform(),
            versions=_versions(),
            commit=commit,
            dirty=dirty,
        )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in ("transformers", "timm"):
        versions[package] = metadata.version(package)
    return {**versions, "mmgraph": mmgraph.__version__}


def _checkout() -> tuple[str | None, bool | None]:
    package = Path(mmgraph.__file__).resolve().parent
    git = ("git", "-C", str(package))
    root = _output([*git, "rev-parse", "--show-toplevel"])
    if root is None or Path(root).resolve() != package.parent:
        return None, None  # installed, perhaps inside somebody else's repository
    commit, status = _output([*git, "rev-parse", "HEAD"]), _output([*git, "status", "--porcelain"])
    return commit, None if status is None else bool(status)


def _driver() -> str | None:
    output = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return output.splitlines()[0].strip() if output else None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _output(command: Sequence[str]) -> str | None:
    """Standard output of `command`, or ``None`` if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
