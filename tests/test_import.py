"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mmgraph

PUBLIC = [
    "BatchDescriptor",
    "BreakableCUDAGraphWrapper",
    "BufferSpec",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CaptureError",
    "CaptureSummary",
    "ConfigError",
    "DecoderGraphs",
    "EncoderBatch",
    "EncoderCudaGraphManager",
    "EncoderFacts",
    "EncoderItemSpec",
    "EncoderRunner",
    "EncoderState",
    "EncoderStats",
    "ExactCall",
    "ForwardContext",
    "GraphConfig",
    "GraphKey",
    "Handle",
    "InvalidInputError",
    "MMGraphError",
    "ProbeCall",
    "Reason",
    "Refusal",
    "ReplayError",
    "SupportsChanges",
    "SupportsDivision",
    "SupportsEncoderCudaGraph",
    "SupportsExactGraphs",
    "SupportsLateChanges",
    "SupportsPrivateCaches",
    "SupportsReference",
    "SupportsTrial",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "break_at_modules",
    "capture_model",
    "current_forward_context",
    "eager_break",
    "forward_context",
    "freeze_gc_for_cudagraph_capture",
    "select_backend",
    "shutdown",
    "supports_encoder_cudagraph",
]
REPORT = (
    "import sys; "
    "print([m for m in ('torch', 'transformers', 'timm', 'accelerate') if m in sys.modules])"
)
NO_DEVICE = "import torch; assert not torch.cuda.is_initialized()"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_mmgraph_loads_no_library_of_models_and_no_torch() -> None:
    assert run(f"import mmgraph; {REPORT}") == "[]"


def test_using_every_public_name_loads_no_library_of_models_and_no_device() -> None:
    use = "import mmgraph; [getattr(mmgraph, name) for name in mmgraph.__all__]"
    assert run(f"{use}; {REPORT}; {NO_DEVICE}") == "['torch']"


def test_the_public_names_are_pinned() -> None:
    assert mmgraph.__all__ == PUBLIC
    assert dir(mmgraph) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_to_the_same_object_each_time(name: str) -> None:
    value = getattr(mmgraph, name)
    assert value is getattr(mmgraph, name)
    assert name == "__version__" or value.__name__ == name


def test_a_star_import_brings_the_public_names() -> None:
    assert run("from mmgraph import *; print(attach.__name__, GraphConfig.__name__)") == (
        "attach GraphConfig"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mmgraph' has no attribute 'attatch'$"):
        mmgraph.attatch  # noqa: B018
