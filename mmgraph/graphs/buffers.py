"""Static input buffers.

The rule: a graph holds addresses, so a buffer is allocated once, at the largest size any graph
will ask for, and is never rebound or regrown. Smaller graphs get prefix views of the same arena.
Two graphs of one arena therefore must not run at the same time, which the manager's lock and the
backend's ``ordered()`` ensure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mmgraph.errors import ReplayError
from mmgraph.types import BufferSpec

__all__ = ["BufferArena", "StaticBuffers"]


class StaticBuffers:
    """The prefix views of an arena that belong to one graph."""

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        self.views = dict(views)
        self._addresses = {name: view.data_ptr() for name, view in self.views.items()}

    def load(self, pieces: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Copy the pieces of each buffer end to end into its first rows.

        Raises:
            ReplayError: A buffer is left out or unknown, or a piece doesn't fit into it.
        """
        if pieces.keys() != self.views.keys():
            raise ReplayError(f"the graph reads {sorted(self.views)}, but got {sorted(pieces)}")
        for name, tensors in pieces.items():
            view, start = self.views[name], 0
            if isinstance(tensors, torch.Tensor):
                raise ReplayError(f"the pieces of {name!r} must be a sequence of tensors, got one")
            if len(tensors) == 1 and tensors[0].shape == view.shape:
                view.copy_(tensors[0], non_blocking=True)
                continue
            for tensor in tensors:
                end = start + tensor.shape[0]
                if end > view.shape[0] or tensor.shape[1:] != view.shape[1:]:
                    raise ReplayError(
                        f"a piece of shape {tuple(tensor.shape)} from row {start} on doesn't fit "
                        f"into the buffer {name!r} of shape {tuple(view.shape)}"
                    )
                view.narrow(0, start, end - start).copy_(tensor, non_blocking=True)
                start = end

    def check_addresses(self) -> None:
        """Raise unless every buffer is where it was at capture.

        Raises:
            ReplayError: One moved; the message names it.
        """
        for name, view in self.views.items():
            if view.data_ptr() != self._addresses[name]:
                raise ReplayError(
                    f"the static buffer {name!r} was captured at {self._addresses[name]:#x} and is "
                    f"now at {view.data_ptr():#x}: buffers must never be rebound or resized"
                )


class BufferArena:
    """One allocation for each named buffer, at its largest size."""

    def __init__(self, largest: Mapping[str, BufferSpec], device: torch.device) -> None:
        # Plain tensors even when made inside inference mode: they are written in every mode.
        with torch.inference_mode(False):
            self.storage = {
                name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for name, spec in largest.items()
            }

    @property
    def num_bytes(self) -> int:
        """Memory of the arena in bytes."""
        return sum(t.numel() * t.element_size() for t in self.storage.values())

    def views(self, specs: Mapping[str, BufferSpec]) -> StaticBuffers:
        """Return prefix views of the shapes in `specs`, filled with their examples.

        Raises:
            ReplayError: A shape does not fit in the arena.
        """
        return StaticBuffers({name: self._view(name, spec) for name, spec in specs.items()})

    def _view(self, name: str, spec: BufferSpec) -> torch.Tensor:
        whole = self.storage[name]
        rows = spec.shape[0]
        if rows > whole.shape[0] or spec.shape[1:] != whole.shape[1:] or spec.dtype != whole.dtype:
            raise ReplayError(
                f"buffer {name!r} needs {spec.shape} of {spec.dtype}, but its arena holds "
                f"{tuple(whole.shape)} of {whole.dtype} and can't grow under live graphs"
            )
        view = whole[:rows]
        if spec.example is not None:
            view.copy_(spec.example)
        elif spec.dtype.is_floating_point:
            view.normal_(generator=_generator(view.device))
        else:
            view.zero_()
        return view


def _generator(device: torch.device) -> torch.Generator:
    # A generator of its own: filling a buffer must not advance the user's random numbers.
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    return generator
