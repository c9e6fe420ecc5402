"""Which kernel attends over packed segments: measured for each shape, once, before a capture.

No kernel is the fastest everywhere. On an H200, for one image of 7,056 patches and heads of 72, the
flash kernel that takes segments of any length needs 1.05 ms and cuDNN's, which takes a dense batch,
0.66 ms; on windows of 64 the two are alike. A dense batch is what a graph has whose segments are
all of one length. FlashAttention 4 (flash-attn-4) takes segments of any length and is faster
than either on long ones.

What a reader would get wrong: the choice is made inside an operator that the compiler doesn't look
into, so that one compiled block serves shapes with different kernels.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from mmgraph.log import WarnOnce, get_logger
from mmgraph.ops.compare import is_off, milliseconds

__all__ = [
    "AttentionChoice",
    "AttentionShape",
    "attend",
    "attending",
    "dense_attention",
    "is_uniform",
]


class AttentionShape(NamedTuple):
    """What the time of attention over segments hangs on."""

    tokens: int
    segments: int
    """Entries of the table of segments."""
    longest: int
    """Bound on the longest segment."""
    heads: int
    head_dim: int
    dtype: torch.dtype
    uniform: bool
    """Whether the segments are all of the longest's length, and hold all tokens."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernel for one shape.

    Attributes:
        kernel: Its name.
        milliseconds: Of each kernel that could do it, where more than one was timed.
    """

    kernel: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Setting:
    uniform: frozenset[tuple[int, int]] = frozenset()
    choices: MutableMapping[AttentionShape, AttentionChoice] | None = None


Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor
]
_NOTHING_KNOWN = _Setting()
_setting: ContextVar[_Setting] = ContextVar("mmgraph_attending", default=_NOTHING_KNOWN)
_warn_once = WarnOnce(get_logger(__name__))
_measured: dict[tuple[int, AttentionShape], AttentionChoice] = {}
_lock = threading.Lock()


@contextmanager
def attending(
    uniform: frozenset[tuple[int, int]] = frozenset(),
    choices: MutableMapping[AttentionShape, AttentionChoice] | None = None,
) -> Iterator[None]:
    """Within the block attention over segments knows what it can't read off its arguments.

    Args:
        uniform: (segments, longest) of tables whose segments are all of that length and hold all
            tokens.
        choices: Kernels are chosen by measurement, and noted here; ``None`` leaves it at flash.
    """
    token = _setting.set(_Setting(uniform, choices))
    try:
        yield
    finally:
        _setting.reset(token)


def is_uniform(cu_seqlens: torch.Tensor, max_seqlen: int) -> bool:
    """Whether the segments are known to be all of the longest's length, and to hold all tokens."""
    return (cu_seqlens.shape[0] - 1, max_seqlen) in _setting.get().uniform


def attend(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention over segments on a CUDA device by the kernel that suits the shape best.

    The device need not be the current one, where kernels of other packages would be launched, and
    where events and the stream that is asked about would be.
    """
    arguments = (query_THK, key_THK, value_THK, cu_seqlens, max_seqlen, scale)
    setting = _setting.get()
    if setting.choices is None:
        return _flash(*arguments)
    tokens, heads, head_dim = query_THK.shape
    segments, uniform = cu_seqlens.shape[0] - 1, is_uniform(cu_seqlens, max_seqlen)
    shape = AttentionShape(tokens, segments, max_seqlen, heads, head_dim, query_THK.dtype, uniform)
    with torch.cuda.device(query_THK.device):
        choice = setting.choices[shape] = _choose(shape, arguments)
        return _KERNELS[choice.kernel].run(*arguments)


def dense_attention(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention within segments of `max_seqlen` tokens each, as a dense batch; (T, H, K)."""

    def batch(x_THK: torch.Tensor) -> torch.Tensor:
        return x_THK.unflatten(0, (-1, max_seqlen)).transpose(1, 2)

    out_SHLK = F.scaled_dot_product_attention(
        batch(query_THK), batch(key_THK), batch(value_THK), scale=scale
    )
    return out_SHLK.transpose(1, 2).reshape(query_THK.shape)


def _flash(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    """PyTorch's own flash attention."""
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query_THK,
        key_THK,
        value_THK,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        False,
        False,
        scale=scale,
    )[0]
    return output


def _dense(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    _: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    """PyTorch's choice for a dense batch: cuDNN's on Hopper."""
    return dense_attention(query_THK, key_THK, value_THK, max_seqlen, scale)


def _flash_4(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THK: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
) -> torch.Tensor:
    """FlashAttention 4 of the package flash-attn-4.

    It reads whole blocks of values and weighs those behind a segment with 0. Behind the last one
    that may be NaN, as nothing writes what comes out there, so it gets zeros.
    """
    from flash_attn.cute import flash_attn_varlen_func

    if not is_uniform(cu_seqlens, max_seqlen):
        rows = torch.arange(value_THK.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        value_THK = value_THK.masked_fill((rows >= cu_seqlens[-1])[:, None, None], 0)
    output: Any = flash_attn_varlen_func(
        query_THK,
        key_THK,
        value_THK,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=False,
    )
    attended: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return attended


class _Candidate(NamedTuple):
    run: Kernel
    serves: Callable[[AttentionShape], bool]


_KERNELS: dict[str, _Candidate] = {
    "flash": _Candidate(_flash, lambda shape: True),
    "dense": _Candidate(_dense, lambda shape: shape.uniform),
    "flash-4": _Candidate(_flash_4, lambda shape: _has_flash_4() and shape.head_dim <= 128),
}


def _has_flash_4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def _choose(shape: AttentionShape, arguments: tuple[Any, ...]) -> AttentionChoice:
    """The kernel for a shape: known, measured now, or flash where nothing can be measured."""
    place = (arguments[0].device.index, shape)
    with _lock:
        known = _measured.get(place)
        if known is not None:
            return known
        names = [name for name, kernel in _KERNELS.items() if kernel.serves(shape)]
        if len(names) == 1:
            return AttentionChoice(names[0])
        if torch.cuda.is_current_stream_capturing():
            return AttentionChoice("flash")
        times = _time_each(names, shape, arguments)
        choice = AttentionChoice(min(times, key=times.__getitem__), times)
        _measured[place] = choice
        return choice


def _time_each(
    names: list[str], shape: AttentionShape, arguments: tuple[Any, ...]
) -> dict[str, float]:
    """Milliseconds of each kernel on segments as long as may be.

    Those that fail are left out, and those that give another result than flash.
    """
    query_THK, key_THK, value_THK, cu_seqlens, max_seqlen, scale = arguments
    ends = torch.arange(shape.segments + 1, dtype=torch.int32, device=cu_seqlens.device)
    table = (ends * max_seqlen).clamp_(max=shape.tokens)
    rows = min(shape.segments * max_seqlen, shape.tokens)  # of no segment are those behind them
    times: dict[str, float] = {}
    expected: torch.Tensor | None = None
    for name in names:
        run = partial(_KERNELS[name].run, query_THK, key_THK, value_THK, table, max_seqlen, scale)
        try:
            output = run()[:rows]
            if expected is None:
                expected = output
            elif is_off(output, expected):
                _warn_once(name, "attention kernel %s is left out: its result is wrong", name)
                continue
            times[name] = milliseconds(run)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a package that is installed, and doesn't take this shape
            if name == "flash":
                raise
    return times
