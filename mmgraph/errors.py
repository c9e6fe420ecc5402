"""The errors of mmgraph.

    MMGraphError
    |-- ConfigError (also ValueError)   a setting or argument is wrong; the message says what may be
    |-- InvalidInputError (also ValueError)   the inputs of a call contradict each other
    |-- UnsupportedModelError           nothing in this model can be captured by mmgraph
    |-- CaptureError                    an encoder could not be recorded as a graph
    `-- ReplayError                     a recorded graph can no longer be replayed

What a graph merely cannot serve is no error: it runs in eager mode and is counted by
:class:`mmgraph.types.Reason`.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ConfigError",
    "InvalidInputError",
    "MMGraphError",
    "ReplayError",
    "UnsupportedModelError",
]


class MMGraphError(Exception):
    """Base class of every error that mmgraph raises itself."""


class ConfigError(MMGraphError, ValueError):
    """A setting or an argument is wrong."""


class InvalidInputError(MMGraphError, ValueError):
    """The inputs of a call contradict each other.

    Raised where eager mode would read out of bounds: on a GPU that ends the whole process.
    """


class UnsupportedModelError(MMGraphError):
    """The model holds no encoder that mmgraph can capture."""


class CaptureError(MMGraphError):
    """An encoder could not be recorded as a graph; the model itself is unharmed."""


class ReplayError(MMGraphError):
    """A recorded graph can no longer be replayed safely."""
