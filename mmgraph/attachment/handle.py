"""What ``mmgraph.attach`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from mmgraph.attachment.doors import all_methods, is_usual
from mmgraph.attachment.features import FeatureModel
from mmgraph.attachment.lifetime import register
from mmgraph.attachment.refit import refit
from mmgraph.attachment.rehearse import rehearse
from mmgraph.attachment.report import render_report
from mmgraph.attachment.wrap import AttachedMethod
from mmgraph.config import GraphConfig
from mmgraph.encoders import Tower, TowerEncoder, encoder_for
from mmgraph.errors import ConfigError, UnsupportedModelError
from mmgraph.graphs import GraphBackend, freeze_gc_for_cudagraph_capture, select_backend
from mmgraph.log import get_logger
from mmgraph.manager import EncoderCudaGraphManager, estimate
from mmgraph.modules import TowerWatch, first_parameter, placement_problem
from mmgraph.preparation import Preparation, Turns
from mmgraph.runner import EncoderRunner
from mmgraph.state import EncoderState
from mmgraph.stats import EncoderStats
from mmgraph.types import Reason

__all__ = ["Handle"]

_logger = get_logger(__name__)


class Handle:
    """An attached model. See :func:`attach`; not made directly."""

    def __init__(self, model: nn.Module, towers: Sequence[Tower], config: GraphConfig) -> None:
        self.model = model
        self.config = config
        self._backends: dict[torch.device, GraphBackend] = {}
        self._preparations: dict[Tower, Preparation] = {}
        self._watches: dict[Tower, TowerWatch] = {}
        self._methods: list[AttachedMethod] = []
        self._attached = True
        try:
            self._attach(towers)
        except BaseException:
            self.detach()
            raise
        register(self, *self._methods)

    @property
    def towers(self) -> list[str]:
        """Names of what is wrapped."""
        return [method.encoder.name for method in self._methods]

    def capture(self, graph_pool: Any | None = None) -> int:
        """Capture the whole ladder of budgets of every encoder now.

        Args:
            graph_pool: Pool handle to allocate from; by default one of our own.

        Returns:
            Bytes of device memory that the captures and their static buffers took.

        Raises:
            CaptureError: An encoder can't be captured.
            ConfigError: The handle is detached.
        """
        managers = self.prepare_capture()
        total = sum(len(manager.upfront.keys_with_room()) for manager in managers)
        with tqdm(total=total, desc="capture", disable=not self.config.progress) as bar:
            return sum(
                manager.capture(graph_pool, progress=lambda _: bar.update()) for manager in managers
            )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within the block every call of the model captures the graphs that it needs, at once.

        A way to be ready for what really comes, with ``capture="upfront"`` as well::

            with handle.capturing():
                for inputs in typical_inputs:
                    model.generate(**inputs, max_new_tokens=1)

        Raises:
            ConfigError: The handle is detached.
        """
        self._check_attached()
        with ExitStack() as stack:
            stack.enter_context(freeze_gc_for_cudagraph_capture())
            for method in self._methods:
                if method.manager is not None:
                    stack.enter_context(method.manager.capturing())
            yield

    def estimate(self) -> int:
        """Bytes of device memory that ``capture()`` would take, within about 15 %.

        Some graphs are captured into a pool of their own and freed again; nothing remains. Where
        graphs are captured already it is an upper bound.

        Raises:
            CaptureError: An encoder can't be captured.
        """
        return estimate([manager.upfront for manager in self.prepare_capture()])

    def refit(self, budgets: int = 16) -> dict[str, tuple[int, ...]]:
        """Fit the budgets of each encoder to the calls that it saw since it was attached.

        Graphs of budgets that stay are kept, unless the largest grows. New ones are captured on
        use, or now with ``capture="upfront"``. An encoder that saw no call stays as it is.

        Args:
            budgets: How many an encoder may have.

        Returns:
            The ascending budgets, in tokens, of each encoder that can have graphs.

        Raises:
            ConfigError: `budgets` is no positive integer.
            CaptureError: With ``capture="upfront"``: an encoder can't be captured.
        """
        changed = refit(self._managers(), budgets)
        if changed and self._attached and self.config.capture == "upfront":
            self.capture()
        return {manager.facts.name: manager.budgets for manager in self._managers()}

    def prepare_capture(self) -> list[EncoderCudaGraphManager]:
        """Rehearse the model, and return what is to be captured, in order.

        Raises:
            UnsupportedModelError: The input shape of no encoder can be read off it.
            ConfigError: The handle is detached.
        """
        self._check_attached()
        usual = [m for m in self._methods if is_usual(m.encoder.tower, m.encoder.method)]
        managers = [m.manager for m in usual if m.manager is not None]
        if managers:
            rehearse(self.model, [m.encoder for m in usual])
        known: list[EncoderCudaGraphManager] = []
        for manager in managers:
            try:
                manager.keys_to_capture()
            except UnsupportedModelError as error:
                if manager is managers[-1] and not known:
                    raise
                _logger.warning("%s isn't captured up front: %s", manager.facts.name, error)
            else:
                known.append(manager)
        return known

    @property
    def closed_gates(self) -> list[Reason]:
        """Why encoders can't be captured; empty if all can."""
        return [m.closed for m in self._methods if m.closed is not None]

    def is_captured(self) -> bool:
        """Whether calls may be replayed."""
        return self._attached and any(manager.is_captured() for manager in self._managers())

    def supports_modality(self, modality: str) -> bool:
        """Whether an encoder of the model takes items of `modality`."""
        return any(modality in m.encoder.tower.modalities for m in self._methods)

    @torch.no_grad()
    def execute(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Encode a batch of items of one modality through the model's own feature function.

        Args:
            mm_kwargs: Arguments of ``get_image_features`` or a sibling of it.

        Returns:
            One tensor (tokens, D) an item.
        """
        return self._features(eager=False).embed_multimodal(**mm_kwargs)

    def runner(self, *, timing: bool = False) -> EncoderRunner:
        """An :class:`EncoderRunner` over this model, for authors of engines."""
        device = self._methods[0].encoder.device
        return EncoderRunner(self._features(eager=True), self, device=device, timing=timing)

    def stats(self) -> EncoderStats:
        """Counters of all encoders together."""
        return EncoderStats.of_all(self.stats_by_tower().values())

    def stats_by_tower(self) -> dict[str, EncoderStats]:
        """Counters of each encoder."""
        return {
            m.encoder.name: m.stats.snapshot() if m.manager is None else m.manager.stats()
            for m in self._methods
        }

    def report(self) -> str:
        """A text for people: graphs, hits and misses by reason, padding, memory, capture time."""
        prepared = {m.encoder.name: m.encoder.preparation.describe() for m in self._methods}
        return render_report(type(self.model).__name__, self.stats_by_tower(), prepared)

    def clear(self) -> None:
        """Free all graphs and stay attached."""
        for method in self._methods:
            if method.manager is not None:
                method.manager.clear()

    def detach(self) -> None:
        """Free all graphs and leave the model as it was; a second call does nothing."""
        if self._attached:
            self._attached = False
            for method in reversed(self._methods):
                method.remove()
            self.clear()
            for preparation in self._preparations.values():
                preparation.undo()
            for watch in self._watches.values():
                watch.forget()

    def shutdown(self) -> None:
        """Detach, and let go of pools and backends; a second call does nothing.

        Unlike after :meth:`detach`, nothing is captured any more even if somebody still holds what
        was wrapped. Call it, or ``mmgraph.shutdown()`` for all handles, before the weights go and
        before ``torch.distributed.destroy_process_group()``.
        """
        self.detach()
        for method in reversed(self._methods):
            method.shutdown()
        self._backends.clear()

    def __enter__(self) -> Handle:
        self._check_attached()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _attach(self, towers: Sequence[Tower]) -> None:
        turns = Turns()  # for all: towers may have modules or a config in common
        for tower in towers:  # all of them first: two towers may share weights, which move
            self._preparations[tower] = _prepare(tower, self.config, turns)
        for tower, preparation in self._preparations.items():
            watch = self._watches[tower] = TowerWatch(tower.module, preparation.turns)
            self._methods += [
                self._make_method(encoder_for(tower, method, preparation, watch))
                for method in all_methods(tower)
            ]
        for method in self._methods:
            method.install()

    def _make_method(self, encoder: TowerEncoder) -> AttachedMethod:
        problem = encoder.check_placement()
        if problem is not None:
            _logger.warning("%s runs in eager mode: %s", encoder.name, problem)
            return AttachedMethod(encoder, None, Reason.PLACEMENT)
        device = encoder.device
        state = EncoderState.build(
            encoder, self.config, device, encoder.dtype, backend=self._backend(device)
        )
        closed = None if state.closed is None else state.closed.reason
        return AttachedMethod(encoder, state.manager, closed)

    def _check_attached(self) -> None:
        if not self._attached:
            raise ConfigError("the handle is detached: attach the model again")

    def _managers(self) -> list[EncoderCudaGraphManager]:
        return [m.manager for m in self._methods if m.manager is not None]

    def _backend(self, device: torch.device) -> GraphBackend:
        if device not in self._backends:
            self._backends[device] = select_backend(self.config.backend, device)
        return self._backends[device]

    def _features(self, *, eager: bool) -> FeatureModel:
        return FeatureModel(self.model, self._methods[0].encoder.tower, eager=eager)


def _prepare(tower: Tower, config: GraphConfig, turns: Turns) -> Preparation:
    """Make a tower ready for fast graphs, unless it will have none."""
    device = first_parameter(tower.module)().device
    has_graphs = config.cudagraph_mm_encoder and not config.enforce_eager
    on_gpu = device.type == "cuda" and config.backend != "trace"
    if not (has_graphs and on_gpu) or placement_problem(tower.module) is not None:
        return Preparation(tower.module, tower.name, turns=turns)
    return Preparation(
        tower.module,
        tower.name,
        align_weights=config.align_weights,
        merge_weights=config.merge_weights,
        fuse_activations=config.fuse_activations,
        fuse_epilogues=config.fuse_epilogues,
        compile_blocks=config.compile_blocks,
        choose_attention=config.choose_attention,
        turns=turns,
    )
