"""What came out of a run, by platform, for docs/models.json."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch

from mmgraph.bench.environment import Environment
from tests.registry.entries.all import ENTRIES
from tests.registry.outcome import Outcome

__all__ = ["DOCUMENT", "Recorder", "documented", "section_name"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.json"
HOW_TO_RECORD = (
    'python -m pytest tests/registry -m "not slow" --registry-results out/results.json && '
    "python -m scripts.models_table --merge out/results.json"
)


def section_name(device: str) -> str:
    """As "trace/transformers-5.24" or "h200/transformers-5.17"."""
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    platform = "trace" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
    return f"{platform}/transformers-{version}"


def documented() -> dict[str, Any]:
    """What docs/models.json holds, by section."""
    if not DOCUMENT.exists():
        return {}
    data: dict[str, Any] = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    return data


class Recorder:
    """Collects outcomes; written when the session ends, if that was asked for.

    Args:
        path: The file to write.
        worker: Of pytest-xdist; its name is put before the file's suffix.
    """

    def __init__(self, path: str | None, worker: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None and worker:
            self.path = self.path.with_suffix(f".{worker}{self.path.suffix}")
        self._outcomes: dict[str, dict[str, Outcome]] = {}

    def add(self, device: str, name: str, outcome: Outcome) -> None:
        self._outcomes.setdefault(device, {})[name] = outcome

    def save(self) -> None:
        if self.path is None or not self._outcomes:
            return
        text = json.dumps(
            {section_name(d): _section(d, o) for d, o in self._outcomes.items()}, indent=1
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text + "\n", encoding="utf-8")


def _section(device: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    import timm
    import transformers

    libraries = {"torch": torch, "transformers": transformers, "timm": timm}
    environment = Environment.read(torch.device(device))
    return {
        "date": datetime.date.today().isoformat(),
        "device": "CPU, float32" if device == "cpu" else torch.cuda.get_device_name(),
        "versions": ", ".join(f"{name} {m.__version__}" for name, m in libraries.items()),
        "commit": environment.commit,
        "dirty": environment.dirty,
        "registered": len(ENTRIES),
        "entries": {name: outcome.to_dict() for name, outcome in outcomes.items()},
    }
