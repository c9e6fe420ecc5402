"""Whether a fresh graph's answer to a probe is right, with a second opinion in half precision.

Kernels that round in other places are rarely 5 % apart. But where a tower is badly conditioned
(many blocks, weights that nobody trained), eager mode itself may be 20 % from what is right, and a
compiled block as far from eager mode though it is no further from that. So a graph in half
precision that is too far from eager mode is held, like eager mode, against a call of the encoder in
float32, and serves if it is about as near.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from mmgraph.errors import CaptureError
from mmgraph.graphs import clean_up
from mmgraph.graphs.backend import ran_out_of_memory, without_frames
from mmgraph.log import get_logger
from mmgraph.manager.verify import in_half, largest_error, max_error, relative_error
from mmgraph.protocol import SupportsReference

__all__ = ["Flat", "Judge"]

Flat = Callable[[Any], Sequence[torch.Tensor]]
"""Gives the tensors of an output in the order in which they are compared."""

_RATIO = 1.10
_CHANCE = 0.25
"""The most by which the errors of few elements may part by chance: that is 4/sqrt(numel)."""
_MEANINGLESS = 1.0
"""Error of eager mode from which on it says nothing: zeros are no further from what is right."""
_PRECISIONS = (  # from the general to the special: most take theirs from the one before
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)

_logger = get_logger(__name__)
_one_at_a_time = threading.Lock()


class Judge:
    """Decides about graphs of one encoder.

    Args:
        model: The encoder.
        name: Where it sits in its model, for messages.
    """

    def __init__(self, model: object, name: str) -> None:
        self._model = model
        self._name = name

    def check(
        self,
        call: Mapping[str, Any],
        ours: Sequence[torch.Tensor],
        eager: Sequence[torch.Tensor],
        flat: Flat,
    ) -> None:
        """Raise unless `ours` is what eager mode gave for `call`, or as right as that.

        Raises:
            CaptureError: It is neither.
        """
        worst = largest_error(ours, eager)
        if worst <= max_error(eager):
            return
        text = f"its graph differs from eager mode by {worst:.1e} on a probe"
        if not (in_half(eager) and isinstance(self._model, SupportsReference)):
            raise CaptureError(text)
        why_not = _second_opinion(self._model, call, ours, eager, flat)
        if why_not is not None:
            raise CaptureError(f"{text}; {why_not}")
        _logger.info("%s: %s, and is as near to float32", self._name, text)


def _second_opinion(
    model: SupportsReference,
    call: Mapping[str, Any],
    ours: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    flat: Flat,
) -> str | None:
    """Why `ours` isn't as right as `eager`, ``None`` if it is; nothing is kept of what it takes."""
    try:
        with _exact_float32(eager[0].device):
            reference = flat(model.embed_in_float32(**_widened(call)))
        return _why_worse(ours, eager, reference)
    except Exception as error:
        without_frames(error)  # they hold the copy in float32
        if ran_out_of_memory(error):  # of the opinion, not of the graph: so not in these words
            return "no room to compare it with float32"
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return f"it can't be compared with float32 ({why})"
    finally:
        reference = []
        clean_up()  # collects as well: a copy of a module may refer to itself


def _why_worse(
    ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> str | None:
    """What is wrong with `ours` when it and `eager` are held against `reference`."""
    if in_half(reference):
        return "it can't be compared with float32 (the reference is in half precision)"
    for a, b, right in zip(ours, eager, reference, strict=True):
        if not b.is_floating_point():
            if relative_error(a, b):
                return "it gives other whole numbers"
            continue
        if right.isinf().any():  # of which every error is a vanishing part
            return "it can't be compared with float32 (the reference isn't finite)"
        error, of_eager = relative_error(a, right), relative_error(b, right)
        ratio = _RATIO + min(_CHANCE, 4 / max(1, b.numel()) ** 0.5)
        if not (of_eager < _MEANINGLESS and error <= ratio * of_eager):  # NaN is no pass
            return f"against float32 it is off by {error:.1e}, eager mode by {of_eager:.1e}"
    return None


def _widened(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of its own tensors, those of floating-point numbers in float32."""
    return {
        name: (value.float() if value.is_floating_point() else value).clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in call.items()
    }


@contextmanager
def _exact_float32(device: torch.device) -> Iterator[None]:
    """Within the block float32 means float32, and tensors are plain ones.

    What a reader would get wrong: a precision that is read may be another one's that it follows.
    Setting it to that would end its following, so only those are set that still aren't exact when
    the ones that they may follow are. And torch's older setting of the same thing must agree with
    the newer one at all times, or whoever reads it gets an error.
    """
    with _one_at_a_time, ExitStack() as stack:  # two that restore in turns would leave it at ieee
        with suppress(RuntimeError):  # they don't agree: the user's own settings are newer ones
            matmul = torch.get_float32_matmul_precision()
            if matmul != "highest":
                stack.callback(torch.set_float32_matmul_precision, matmul)
                torch.set_float32_matmul_precision("highest")
        for backend, operation in _PRECISIONS:
            found = torch._C._get_fp32_precision_getter(backend, operation)
            if found != "ieee":
                stack.callback(torch._C._set_fp32_precision_setter, backend, operation, found)
                torch._C._set_fp32_precision_setter(backend, operation, "ieee")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
