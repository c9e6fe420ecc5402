"""The command line: ``mmgraph COMMAND ...``, or ``python -m mmgraph COMMAND ...``.

A command is a package with ``add_arguments(parser)`` and ``main(namespace) -> int``. Only the one
that was asked for is imported, so that none can keep another from running.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from mmgraph import __version__
from mmgraph.errors import ConfigError, UnsupportedModelError

__all__ = ["main"]

_COMMANDS = {
    "demo": "capture a few encoders and show what it gives",
    "bench": "measure eager mode against graphs on this machine",
    "inspect": "show the towers of a model and what is captured of them",
    "plan": "fit the budgets to sizes that calls had",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; 2 means that it couldn't be run as asked.

    Args:
        arguments: The command and its options; by default those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(given[0] if given else "")
    namespace = argparse.Namespace(command_line=shlex.join(["mmgraph", *given]))
    parser.parse_args(given, namespace)
    try:
        return int(import_module(f"mmgraph.{namespace.command}").main(namespace))
    except (ConfigError, UnsupportedModelError) as error:
        print(f"mmgraph {namespace.command}: {error}", file=sys.stderr)
        return 2


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser, with the options of the command `chosen` only."""
    parser = argparse.ArgumentParser(
        prog="mmgraph", description="CUDA graphs for multimodal encoders."
    )
    parser.add_argument("--version", action="version", version=f"mmgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == chosen:
            import_module(f"mmgraph.{name}").add_arguments(command)
    return parser
