"""How the compiler's norms read their rows.

Inductor's kernels for norms hold a row in registers if it has up to 1,024 elements, and read longer
ones twice. The rows of towers have 1,152 or 1,280 elements, and a norm of a small image takes
as long as its kernel waits for memory: on an H200 Qwen3-VL-8B's tower takes 2.68 instead of 2.83 ms
for 784 patches, and 27.1 instead of 28.1 ms for 7,056, with rows of up to 4,096 held at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

__all__ = ["rows_at_once"]

_LONGEST = 4096


def rows_at_once() -> AbstractContextManager[Any]:
    """Within the block what is compiled reads rows once; where Inductor can't be told, as it does.

    Only what is compiled by this thread.
    """
    choices = _choices()
    if choices is None:
        return nullcontext()
    from torch._inductor import config

    own = getattr(config, "inductor_choices_class", None)
    if own is not None or not config.triton.persistent_reductions:  # somebody has chosen otherwise
        return nullcontext()

    return _in_force(choices)


@contextmanager
def _in_force(choices: Any) -> Iterator[None]:
    """`choices` are Inductor's; code that is made with them is kept apart in its caches."""
    from torch._inductor.virtualized import V

    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag}mmgraph-rows"
    with config.patch(cache_key_tag=tag), V.set_choices_handler(choices):
        yield


@lru_cache(maxsize=1)
def _choices() -> Any | None:
    """Inductor's choices with another limit, or ``None`` where it has other ways to choose."""
    try:
        from torch._inductor.choices import InductorChoices
        from torch._inductor.runtime.hints import ReductionHint
        from torch._inductor.virtualized import V

        theirs = InductorChoices.should_use_persistent_reduction
    except (ImportError, AttributeError):
        return None
    if not (hasattr(V, "set_choices_handler") and hasattr(torch.compiler.config, "cache_key_tag")):
        return None

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if theirs(features, cooperative_reduction):
                return True
            if cooperative_reduction or features.get_reduction_hint() != ReductionHint.INNER:
                return False
            sizes = V.graph.sizevars
            return bool(sizes.statically_known_leq(features.reduction_numel, _LONGEST))

    return Choices()
