"""Capturing a whole model, encoder and decoder, in one go: for authors of engines.

    decoder = DecoderGraphs(dummy_run, CUDAGraphMode.FULL_AND_PIECEWISE, descriptors)
    summary = capture_model(encoder=state, decoder=decoder, progress=True)
    ...
    with forward_context(decoder.mode_for(descriptor), descriptor):
        model(**persistent_buffers)

The two parts are captured under their own conditions: one that is off says nothing about the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from mmgraph.errors import CaptureError
from mmgraph.graphs import (
    BatchDescriptor,
    CUDAGraphMode,
    GraphLog,
    clean_up,
    forward_context,
    freeze_gc_for_cudagraph_capture,
)
from mmgraph.graphs.backend import ran_out_of_memory
from mmgraph.log import get_logger
from mmgraph.manager import EncoderCudaGraphManager
from mmgraph.state import EncoderState, closed_gate
from mmgraph.types import Reason

__all__ = ["CaptureSummary", "DecoderGraphs", "SupportsCapture", "capture_model"]

_logger = get_logger(__name__)
_NOTHING = (
    "nothing is captured. The encoder runs from graphs with "
    "GraphConfig(cudagraph_mm_encoder=True), which is the default (%s); the decoder with a "
    "CUDAGraphMode other than NONE (%s); neither does with enforce_eager"
)


class SupportsCapture(Protocol):
    """What :func:`capture_model` asks of an attached model; :class:`mmgraph.Handle` has it."""

    @property
    def closed_gates(self) -> Sequence[Reason]:
        """Why encoders can't be captured; empty if all can."""

    def prepare_capture(self) -> Sequence[EncoderCudaGraphManager]:
        """Get ready, and return what is to be captured, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSummary:
    """What :func:`capture_model` did.

    Attributes:
        encoder_bytes: Device memory of the encoder's new graphs and static buffers, in bytes.
        decoder_bytes: Growth of the device memory that torch holds during the decoder's captures.
        encoder_graphs: New graphs of the encoder.
        decoder_graphs: New graphs of the decoder, counted by wrapper.
        encoder_reason: Why the encoder isn't captured, or not for every budget; ``None`` if it is,
            or if there is none.
        decoder_reason: Likewise for the decoder and its descriptors.
        seconds: Time that it all took.
    """

    encoder_bytes: int = 0
    decoder_bytes: int = 0
    encoder_graphs: int = 0
    decoder_graphs: int = 0
    encoder_reason: Reason | None = None
    decoder_reason: Reason | None = None
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Device memory of both parts in bytes."""
        return self.encoder_bytes + self.decoder_bytes

    @property
    def graphs(self) -> int:
        """New graphs of both parts."""
        return self.encoder_graphs + self.decoder_graphs


class DecoderGraphs:
    """The graphs of a decoder, captured by dummy runs of it.

    Args:
        dummy_run: Runs one forward for a batch, through the ``CUDAGraphWrapper`` or
            ``BreakableCUDAGraphWrapper`` of the model, on the persistent buffers that later
            forwards of that batch use. It must not enter a forward context of its own.
        mode: Which graphs there are to be: NONE, PIECEWISE, FULL or FULL_AND_PIECEWISE.
        descriptors: Batches to capture.
    """

    def __init__(
        self,
        dummy_run: Callable[[BatchDescriptor], Any],
        mode: CUDAGraphMode,
        descriptors: Iterable[BatchDescriptor],
    ) -> None:
        self.mode = mode
        self.descriptors = sorted(dict.fromkeys(descriptors), key=lambda d: -d.num_tokens)
        self.failed: dict[tuple[BatchDescriptor, CUDAGraphMode], Reason] = {}
        self._dummy_run = dummy_run
        self._logs: dict[tuple[BatchDescriptor, CUDAGraphMode], GraphLog] = {}

    def mode_for(self, descriptor: BatchDescriptor) -> CUDAGraphMode:
        """The best mode that `descriptor` is captured in: FULL, else PIECEWISE, else NONE."""
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            if (descriptor, mode) in self._logs:
                return mode
        return CUDAGraphMode.NONE

    def to_capture(self) -> list[tuple[BatchDescriptor, CUDAGraphMode]]:
        """What ``capture()`` records and isn't captured yet: the largest first, FULL first."""
        modes = []
        if self.mode.has_full_cudagraphs():
            modes.append(CUDAGraphMode.FULL)
        if self.mode.has_piecewise_cudagraphs():
            modes.append(CUDAGraphMode.PIECEWISE)
        pairs = [(descriptor, mode) for descriptor in self.descriptors for mode in modes]
        return [pair for pair in pairs if pair not in self._logs]

    def capture(self, progress: Callable[[BatchDescriptor], None] | None = None) -> int:
        """Capture each batch in each mode, the largest first.

        Where memory runs out, what this batch has taken is freed, and smaller ones are still tried;
        :attr:`failed` says so. A batch in whose dummy run no wrapper took part isn't captured.

        Args:
            progress: Called with each batch before its capture.

        Returns:
            How many graphs are new.

        Raises:
            Exception: What `dummy_run` raised for another reason than memory; what was captured
                for other batches stays.
        """
        graphs = 0
        for descriptor, mode in self.to_capture():
            if progress is not None:
                progress(descriptor)
            reason = self._capture(descriptor, mode)
            if reason is None:
                self.failed.pop((descriptor, mode), None)
                graphs += self._logs[descriptor, mode].num_captured
                continue
            self.failed[descriptor, mode] = reason
            _logger.warning("%s runs without a %s graph: %s", descriptor, mode.name, reason.value)
            if reason is Reason.OUT_OF_MEMORY:
                clean_up()
        return graphs

    def clear(self) -> None:
        """Free every graph that was captured here; do this rather than clear the wrappers."""
        for log in self._logs.values():
            log.undo()
        self._logs.clear()
        self.failed.clear()

    @torch.no_grad()
    def _capture(self, descriptor: BatchDescriptor, mode: CUDAGraphMode) -> Reason | None:
        with forward_context(mode, descriptor, capture_allowed=True) as context:
            try:
                self._dummy_run(descriptor)
            except BaseException as error:
                context.log.undo()
                if not (isinstance(error, Exception) and ran_out_of_memory(error)):
                    raise
                return Reason.OUT_OF_MEMORY
        if not context.log.served:
            return Reason.NO_WRAPPER
        self._logs[descriptor, mode] = context.log
        return None


def capture_model(
    *,
    encoder: EncoderCudaGraphManager | EncoderState | SupportsCapture | None = None,
    decoder: DecoderGraphs | None = None,
    enforce_eager: bool = False,
    progress: bool = False,
) -> CaptureSummary:
    """Capture the encoder's graphs, then the decoder's, with the collector frozen once.

    Where memory runs out, what was captured stays, the rest is freed, and the batches without a
    graph run in eager mode; the summary gives that as the reason.

    Args:
        encoder: A handle, a manager or a state; captured unless a gate of its config is closed.
        decoder: The decoder's graphs; captured unless its mode is NONE or `enforce_eager` is set.
        enforce_eager: Leave the decoder in eager mode; the encoder's config has its own switch.
        progress: Show one progress bar over both.

    Returns:
        What was captured, what it took, and why the rest wasn't.

    Raises:
        CaptureError: An encoder can't be captured, for another reason than memory.
        Exception: What the decoder's `dummy_run` raised, likewise; the encoder's graphs stay.
    """
    start = time.perf_counter()
    managers, reasons = _open_managers(encoder)
    decoder_reason = None if decoder is None else _why_not(decoder, enforce_eager)
    batches = [] if decoder is None or decoder_reason is not None else decoder.to_capture()
    if not managers and (decoder is None or decoder_reason is not None):
        _logger.warning(
            _NOTHING,
            reasons[0].value if reasons else "there is none",
            "there is none" if decoder_reason is None else decoder_reason.value,
        )
        return CaptureSummary(
            encoder_reason=next(iter(reasons), None), decoder_reason=decoder_reason
        )
    total = len(batches) + sum(len(m.upfront.keys_with_room()) for m in managers)
    with (
        freeze_gc_for_cudagraph_capture(),
        tqdm(total=total, desc="capture", disable=not progress) as bar,
    ):
        encoder_graphs, encoder_bytes = _capture_managers(managers, lambda _: bar.update())
        reasons += [reason for m in managers if (reason := m.upfront.missing()) is not None]
        decoder_graphs = decoder_bytes = 0
        if decoder is not None and decoder_reason is None:
            before = _reserved_bytes()
            decoder_graphs = decoder.capture(lambda _: bar.update())
            decoder_bytes = max(0, _reserved_bytes() - before)
            decoder_reason = next(iter(decoder.failed.values()), None)
    summary = CaptureSummary(
        encoder_bytes=encoder_bytes,
        decoder_bytes=decoder_bytes,
        encoder_graphs=encoder_graphs,
        decoder_graphs=decoder_graphs,
        encoder_reason=next(iter(reasons), None),
        decoder_reason=decoder_reason,
        seconds=time.perf_counter() - start,
    )
    _logger.info(
        "%d graphs captured in %.1f s, %.1f MiB",
        summary.graphs,
        summary.seconds,
        summary.num_bytes / 2**20,
    )
    return summary


def _open_managers(encoder: Any) -> tuple[list[EncoderCudaGraphManager], list[Reason]]:
    """The managers to capture, and why others aren't to be."""
    if encoder is None:
        return [], []
    if isinstance(encoder, EncoderCudaGraphManager):
        gate = closed_gate(encoder.config, encoder.model)
        return ([encoder], []) if gate is None else ([], [gate.reason])
    if isinstance(encoder, EncoderState):
        managers = [] if encoder.manager is None else [encoder.manager]
        return managers, [] if encoder.closed is None else [encoder.closed.reason]
    return list(encoder.prepare_capture()), list(encoder.closed_gates)


def _why_not(decoder: DecoderGraphs, enforce_eager: bool) -> Reason | None:
    if enforce_eager:
        return Reason.ENFORCE_EAGER
    return Reason.MODE_NONE if decoder.mode is CUDAGraphMode.NONE else None


def _capture_managers(
    managers: Sequence[EncoderCudaGraphManager], progress: Callable[[Any], None]
) -> tuple[int, int]:
    """Capture them; return new graphs and bytes. That memory runs out ends none but its own."""
    graphs = num_bytes = 0
    for manager in managers:
        before = len(manager.stats().graphs)
        try:
            num_bytes += manager.capture(progress=progress)
        except CaptureError as error:
            if not ran_out_of_memory(error):
                raise
        graphs += len(manager.stats().graphs) - before
    return graphs, num_bytes


def _reserved_bytes() -> int:
    """Device memory that torch holds on all devices, without what it could hand back now."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count()))
