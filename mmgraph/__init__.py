"""Multimodal encoders at the speed of the GPU: capture them as CUDA graphs, one a token budget.

    import mmgraph
    handle = mmgraph.attach(model)          # a model of transformers or timm
    model.generate(**inputs)                # its encoders now run from graphs
    print(handle.report())

Importing this loads neither transformers nor timm and touches no device.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "BatchDescriptor": "graphs",
    "BreakableCUDAGraphWrapper": "graphs",
    "BufferSpec": "types",
    "CUDAGraphMode": "graphs",
    "CUDAGraphWrapper": "graphs",
    "CaptureError": "errors",
    "CaptureSummary": "orchestration",
    "ConfigError": "errors",
    "DecoderGraphs": "orchestration",
    "EncoderBatch": "types",
    "EncoderCudaGraphManager": "manager",
    "EncoderFacts": "types",
    "EncoderItemSpec": "types",
    "EncoderRunner": "runner",
    "EncoderState": "state",
    "EncoderStats": "stats",
    "ExactCall": "types",
    "ForwardContext": "graphs",
    "GraphConfig": "config",
    "GraphKey": "types",
    "Handle": "attachment",
    "InvalidInputError": "errors",
    "MMGraphError": "errors",
    "ProbeCall": "types",
    "Reason": "types",
    "Refusal": "types",
    "ReplayError": "errors",
    "SupportsChanges": "protocol",
    "SupportsDivision": "protocol",
    "SupportsEncoderCudaGraph": "protocol",
    "SupportsExactGraphs": "protocol",
    "SupportsLateChanges": "protocol",
    "SupportsPrivateCaches": "protocol",
    "SupportsReference": "protocol",
    "SupportsTrial": "protocol",
    "UnsupportedModelError": "errors",
    "attach": "attachment",
    "break_at_modules": "graphs",
    "capture_model": "orchestration",
    "current_forward_context": "graphs",
    "eager_break": "graphs",
    "forward_context": "graphs",
    "select_backend": "graphs",
    "freeze_gc_for_cudagraph_capture": "graphs",
    "shutdown": "attachment",
    "supports_encoder_cudagraph": "protocol",
}

__all__ = sorted((*_EXPORTS, "__version__"))


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mmgraph' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"mmgraph.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
