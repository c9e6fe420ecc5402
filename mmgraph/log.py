"""Logging: one logger a module below ``mmgraph``, and warnings that are given once."""

from __future__ import annotations

import logging
import threading

__all__ = ["WarnOnce", "get_logger"]


def get_logger(name: str) -> logging.Logger:
    """Return the standard-library logger called `name`."""
    return logging.getLogger(name)


class WarnOnce:
    """Logs a warning the first time its topic is seen; one object an owner: nothing is global."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[object] = set()
        self._lock = threading.Lock()

    def __call__(
        self, topic: object, message: str, *args: object, level: int = logging.WARNING
    ) -> None:
        """Log `message % args` at `level` unless `topic` was logged before."""
        with self._lock:
            if topic in self._seen:
                return
            self._seen.add(topic)
        self._logger.log(level, message, *args)
