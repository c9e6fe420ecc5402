"""What the time of a call goes into, by class of kernel.

    >>> kernel_times(lambda: tower(pixels), torch.device("cuda"))
    {'matmul': 4.1, 'attention': 1.2, 'norm': 0.3, 'copy': 0.1, 'other': 0.9}

On CUDA that is the time of kernels on the device, those of a graph's replay as well; on the CPU the
time of PyTorch's operators, each without those that it calls. Kernels are told apart by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from mmgraph.bench.timing import Call, synchronizer

__all__ = ["CLASSES", "OTHER", "classify", "kernel_times", "shares"]

OTHER = "other"
_COMPILED = re.compile(r"triton_(poi|per|red|for)_")
_NORM = re.compile(r"norm|rsqrt|meanops", re.IGNORECASE)
_PATTERNS = {
    "attention": re.compile(r"fmha|flash|attention|attn|sdpa", re.IGNORECASE),
    "matmul": re.compile(
        r"gemm|nvjet|cutlass|cublas|xmma|matmul|splitk|conv|(::|_)linear\b|triton_(mm|tem)|mm(_|\b|$)",
        re.IGNORECASE,
    ),
    "norm": _NORM,
    "copy": re.compile(r"mem(cpy|set)|copy|catarray|aten::(cat|clone|contiguous)", re.IGNORECASE),
}
CLASSES = (*_PATTERNS, OTHER)
"""Classes of kernels, in the order of a table."""


def kernel_times(call: Call, device: torch.device, *, calls: int = 3) -> dict[str, float]:
    """Profile `calls` calls and return the milliseconds of one by class of kernel.

    Args:
        call: What to profile; it is made once before.
        device: Where it runs.
        calls: How many are averaged.
    """
    synchronize = synchronizer(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    call()
    synchronize()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(calls):
            call()
        synchronize()
    totals = dict.fromkeys(CLASSES, 0.0)
    for name, microseconds in _events(profiler, cuda=device.type == "cuda"):
        totals[classify(name)] += microseconds / calls / 1e3
    return totals


def shares(times: Mapping[str, float]) -> dict[str, float]:
    """The part of each class in the sum, from 0 to 1; all 0 where nothing was seen."""
    total = sum(times.values())
    return {name: ms / total if total else 0.0 for name, ms in times.items()}


def classify(name: str) -> str:
    """The class of a kernel or operator.

    Fused code of the compiler is named after everything that went into it, also the product whose
    result it takes: it is a norm if there is one in it, else something other.
    """
    if _COMPILED.search(name):
        return "norm" if _NORM.search(name) else OTHER
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


def _events(profiler: profile, *, cuda: bool) -> Iterator[tuple[str, float]]:
    """Name and microseconds of each kernel, or of each operator."""
    for event in profiler.events() or ():
        if cuda:
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
                yield event.name, event.time_range.elapsed_us()
        elif event.device_type.name == "CPU":
            yield event.name, event.self_cpu_time_total
