"""The fastest attention that there is for a shape, found by trying.

Each candidate takes the segments of a call and their tensors and returns what runs it, or raises.
To try another kernel, add it to `CANDIDATES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmgraph.bench.handmade import microseconds
from mmgraph.bench.timing import Call
from mmgraph.bench.workload import Attention
from mmgraph.ops import attending, varlen_attention

__all__ = ["CANDIDATES", "Candidate", "Fastest", "Segments", "describe", "fastest_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The tensors of attention of one shape, with random contents.

    Attributes:
        query_THK: Rows of all segments, end to end.
        key_THK: Likewise.
        value_THK: Likewise.
        cu_seqlens: Boundaries of the segments of the queries, int32.
        mask: One that masks nothing, if there is any.
    """

    query_THK: torch.Tensor
    key_THK: torch.Tensor
    value_THK: torch.Tensor
    cu_seqlens: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def random(cls, attention: Attention, device: torch.device) -> Segments:
        """Draw tensors for `attention`."""

        def draw(lengths: tuple[int, ...], heads: int, width: int) -> torch.Tensor:
            return torch.randn(sum(lengths), heads, width, device=device, dtype=attention.dtype)

        bounds = [0, *accumulate(attention.queries)]
        return cls(
            draw(attention.queries, attention.heads, attention.head_dim),
            draw(attention.keys, attention.key_heads, attention.head_dim),
            draw(attention.keys, attention.key_heads, attention.value_dim),
            torch.tensor(bounds, dtype=torch.int32, device=device),
            _mask(attention, device),
        )


Candidate = Callable[[Attention, Segments], Call]


@dataclass(frozen=True, slots=True, eq=False)
class Fastest:
    """The outcome for one shape.

    Attributes:
        name: Of the fastest candidate.
        run: It, on tensors of its own.
        microseconds: Of each candidate that could do it.
        failed: Why the others couldn't.
    """

    name: str
    run: Call
    microseconds: Mapping[str, float]
    failed: Mapping[str, str]


def fastest_attention(attention: Attention, device: torch.device) -> Fastest:
    """Time all candidates for `attention`, on CUDA each in a small graph of its own.

    Raises:
        RuntimeError: None of them can do it.
    """
    segments = Segments.random(attention, device)
    runs: dict[str, Call] = {}
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, candidate in CANDIDATES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SDPA warns why a backend can't, then raises
                run = candidate(attention, segments)
                times[name] = microseconds(run, device)
            runs[name] = run
        except Exception as error:
            failed[name] = describe(error)
    if not times:
        raise RuntimeError(f"no attention for {attention}: {failed}")
    name = min(times, key=times.__getitem__)
    return Fastest(name, runs[name], times, failed)


def describe(error: BaseException) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _dense(backend: SDPBackend | None, attention: Attention, segments: Segments) -> Call:
    """Segments of one length as a dense batch, with one of PyTorch's backends or its own choice."""
    count = len(attention.queries)
    if len(set(attention.queries)) > 1 or len(set(attention.keys)) > 1:
        raise ValueError("segments of different lengths are no dense batch")

    def batch(x_THK: torch.Tensor) -> torch.Tensor:
        return x_THK.unflatten(0, (count, -1)).transpose(1, 2)

    run = partial(
        F.scaled_dot_product_attention,
        batch(segments.query_THK),
        batch(segments.key_THK),
        batch(segments.value_THK),
        attn_mask=segments.mask,
        is_causal=attention.causal,
        scale=attention.scale,
        enable_gqa=attention.heads != attention.key_heads,
    )

    def with_backend() -> Any:
        assert backend is not None
        with sdpa_kernel(backend):
            return run()

    return run if backend is None else with_backend


def _packed(attention: Attention, segments: Segments) -> Call:
    """The kernel that packed towers are captured with unless another one is measured faster."""
    plain = attention.mask is None and not attention.causal
    alike = attention.heads == attention.key_heads and attention.head_dim == attention.value_dim
    if not plain or not alike or attention.queries != attention.keys:
        raise ValueError("attention over segments has no mask and equal queries, keys and values")
    return partial(
        varlen_attention,
        segments.query_THK,
        segments.key_THK,
        segments.value_THK,
        segments.cu_seqlens,
        max(attention.queries),
        attention.scale,
    )


def _chosen(attention: Attention, segments: Segments) -> Call:
    """What mmgraph chooses for its own graphs: FlashAttention 4 as well, where it is installed."""
    call = _packed(attention, segments)
    count, longest = len(attention.queries), max(attention.queries)
    uniform = [(count, longest)] if sum(attention.queries) == count * longest else []

    def run() -> Any:
        with attending(frozenset(uniform), {}):
            return call()

    return run


def _mask(attention: Attention, device: torch.device) -> torch.Tensor | None:
    if attention.mask is None:
        return None
    shape, dtype = attention.mask
    make = torch.ones if dtype == torch.bool else torch.zeros
    return make(shape, dtype=dtype, device=device)


CANDIDATES: dict[str, Candidate] = {
    "dense, PyTorch's choice": partial(_dense, None),
    "dense, cuDNN": partial(_dense, SDPBackend.CUDNN_ATTENTION),
    "dense, flash": partial(_dense, SDPBackend.FLASH_ATTENTION),
    "dense, memory-efficient": partial(_dense, SDPBackend.EFFICIENT_ATTENTION),
    "segments, flash": _packed,
    "segments, mmgraph's choice": _chosen,
}
"""What is tried, by name."""
