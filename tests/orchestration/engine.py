"""A small engine with a decoder, as its author writes it."""

from __future__ import annotations

import torch
from torch import nn

from mmgraph import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    DecoderGraphs,
    current_forward_context,
    eager_break,
    forward_context,
)
from mmgraph.graphs import select_backend

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
BATCHES = [BatchDescriptor(n) for n in (4, 16, 8)]


class Engine:
    """A decoder of two layers in an engine: a graph of all, or one of each half; own buffers.

    Attributes:
        runs: Mode and tokens of each dummy run.
        python: How often the Python of a layer ran.
        fails: What a dummy run raises, by mode and tokens, after the first half.
    """

    def __init__(self, device: str) -> None:
        self.runs: list[tuple[CUDAGraphMode, int]] = []
        self.python = 0
        self.fails: dict[tuple[CUDAGraphMode, int], BaseException] = {}
        self.buffers = {d: torch.randn(d.num_tokens, 8, device=device) for d in BATCHES}
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).to(device)
        self.layers.requires_grad_(False)
        backend = select_backend("auto", torch.device(device))
        shift = eager_break(lambda x: x + 1)
        self.first = BreakableCUDAGraphWrapper(
            lambda x: shift(self._layer(0, x)), PIECEWISE, backend=backend
        )
        self.second = CUDAGraphWrapper(self._second, PIECEWISE, backend=backend)
        self.whole = CUDAGraphWrapper(lambda x: self.second(self.first(x)), FULL, backend=backend)

    def decoder(self, mode: CUDAGraphMode) -> DecoderGraphs:
        return DecoderGraphs(self.dummy_run, mode, BATCHES)

    def dummy_run(self, descriptor: BatchDescriptor) -> torch.Tensor:
        context = current_forward_context()
        assert context is not None
        self.runs.append((context.mode, descriptor.num_tokens))
        return self.forward(descriptor)

    def forward(self, descriptor: BatchDescriptor) -> torch.Tensor:
        output: torch.Tensor = self.whole(self.buffers[descriptor])
        return output

    def expected(self, descriptor: BatchDescriptor) -> torch.Tensor:
        x = self.layers[0](self.buffers[descriptor]) + 1
        output: torch.Tensor = self.layers[1](x)
        return output

    def captured(self) -> dict[str, list[int]]:
        return {
            name: sorted(d.num_tokens for d in wrapper.descriptors)
            for name, wrapper in vars(self).items()
            if isinstance(wrapper, (CUDAGraphWrapper, BreakableCUDAGraphWrapper))
        }

    def _second(self, x: torch.Tensor) -> torch.Tensor:
        context = current_forward_context()
        if context is not None:
            error = self.fails.get((context.mode, len(x)))
            if error is not None:
                raise error
        return self._layer(1, x)

    def _layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        self.python += 1
        output: torch.Tensor = self.layers[i](x)
        return output


def no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def assert_serves(engine: Engine, decoder: DecoderGraphs, descriptor: BatchDescriptor) -> None:
    """In the mode that the decoder names, a forward is right, and no Python runs in a graph."""
    mode, python = decoder.mode_for(descriptor), engine.python
    engine.buffers[descriptor].normal_()
    with torch.no_grad(), forward_context(mode, descriptor):
        output = engine.forward(descriptor).clone()
    assert engine.python == python + (2 if mode is NONE else 0)
    torch.testing.assert_close(output, engine.expected(descriptor), rtol=1e-4, atol=1e-4)
