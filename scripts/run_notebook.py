"""Run a notebook from top to bottom and write it with its outputs.

    python -m scripts.run_notebook notebooks/latency_comparison.ipynb out/latency_comparison.ipynb

What was reached is written even if a cell fails. Needs nbclient and ipykernel (extra ``dev``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_SECONDS = 600


def main(arguments: Sequence[str]) -> int:
    """Run the notebook of the first path and write it to the second."""
    import nbformat  # here, as a GPU machine that runs the tests may be without them
    from nbclient import NotebookClient

    source, target = map(Path, arguments)
    # The kernel is another process, which has to find mmgraph without an installation too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.parent)}},
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
