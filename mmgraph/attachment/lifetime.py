"""What is attached in this process, and how all of it ends.

A CUDA graph must go before what it refers to: before the weights, before the communicators of the
process groups that it was captured with, and before the interpreter takes torch apart. A handle may
be dropped while its model stays attached, so what is kept in mind is each wrapped method as well.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

__all__ = ["register", "shutdown"]


class _Closable(Protocol):
    def shutdown(self) -> None: ...


_live: WeakSet[_Closable] = WeakSet()
_lock = threading.Lock()
_process: int | None = None
"""The process in which `_at_exit` is registered."""


def register(*objects: _Closable) -> None:
    """Let ``shutdown()``, and the end of the interpreter, close `objects` if they still live."""
    global _process
    with _lock:
        _live.update(objects)
        if _process is None:
            _process = os.getpid()
            atexit.register(_at_exit)


def shutdown() -> None:
    """Detach every attached model and free its graphs and buffers; a second call does nothing.

    Call it before ``torch.distributed.destroy_process_group()``, while the models still live: a
    captured collective needs its communicator until the graph is gone. Otherwise it runs when the
    interpreter ends. Managers and wrappers of an engine's own are cleared by the engine.
    """
    with _lock:
        live = list(_live)
    with ExitStack() as stack:  # one that fails must not keep the others
        for closable in live:
            stack.callback(closable.shutdown)


def _at_exit() -> None:
    if os.getpid() == _process:  # a forked child must leave its parent's graphs alone
        shutdown()
