"""The Megatron-Core learner: scores micro-batches and applies optimizer steps.

Shape letters: B rows, R padded row length, C columns of this rank, P channels of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from moe_trm.learner.base import LearnerBase, adds_in_order, replays
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.megatron.model import global_modules
from moe_trm.learner.megatron.optimizer import MegatronGuardedOptimizer
from moe_trm.learner.megatron.parts import Parts
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.megatron.schedule import Schedule
from moe_trm.learner.megatron.state import MegatronState
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.learner.scoring import Scoring
from moe_trm.learner.snapshots import Snapshots
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.hosts.megatron_checks import all_moe_layer_ids
from routing.megatron import MegatronReplayer
from routing.record.sources import Recorded, RouteSource
from routing.replay.router_losses import RouterTerms


class MegatronLearner(LearnerBase):
    """`Learner` on Megatron-Core. Every call is collective; build it with `build.build_megatron_learner`.

    Args:
        chunks: this rank's part of the model, one chunk per virtual pipeline stage.
        wrapped: `chunks` inside Megatron's data-parallel wrapper.
        replayer: attached to `wrapped`; None for a dense model.
        temperature: of the rollout; divides the logits in every pass.
        computes_in: rounding of the weights in every pass; None: passes use them as they are.
        frozen_base: adapters alone train, so copies of the weights are copies of adapters.
        noise: on the inputs of layers in updates.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: MegatronGuardedOptimizer,
        replayer: MegatronReplayer | None,
        exporter: HfExporter,
        training: MegatronState,
        parts: Parts,
        *,
        temperature: float,
        device: torch.device,
        computes_in: Rounding | None = None,
        frozen_base: bool = False,
        noise: LayerNoise | None = None,
    ) -> None:
        super().__init__(
            replayer,
            exporter,
            Snapshots(chunks, computes_in=computes_in, trained_only=frozen_base),
            training,
            DataGroup(parallel_state.get_data_parallel_group(), device),
            is_data_leader=parts.is_data_leader,
            model_moe_layer_ids=all_moe_layer_ids(chunks[0].config) if replayer is not None else (),
            noise=noise,
            repeats_passes=replayer is None or adds_in_order(device, int(chunks[0].config.moe_router_topk)),
        )
        self._chunks, self._wrapped, self._optimizer, self._parts = chunks, wrapped, optimizer, parts
        self._temperature, self._device = temperature, device
        self._modules = [module for chunk in wrapped for module in chunk.modules()]
        self._schedule = Schedule(wrapped, parts, replayer, device)
        self._has_gradients = True

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """See `Learner.named_modules`."""
        return global_modules(self._chunks)

    @torch.no_grad()
    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
        temperature: float | None = None,
    ) -> list[Scores]:
        """See `Learner.score`."""
        self._train(False)
        scoring_of = partial(Scoring.of, temperature=temperature or self._temperature, kept_mass=kept_mass)
        with self._snapshots.computing(weights):
            channels, kept = self._schedule.run(batches, sources, scoring_of)
            if replays(sources):
                self._verify(batches, sources, partial(self._look, batches))
        return [
            replace(scoring_of(batch).scores(scored), recorded=routed.recorded, router=routed.scores)
            for batch, scored, routed in zip(batches, channels, kept, strict=True)
        ]

    def update(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        objective: Callable[[int, Scores], Tensor],
        *,
        entropy: bool = False,
        kept_mass: bool = False,
        lr_scale: float = 1.0,
        router_terms: RouterTerms | None = None,
    ) -> UpdateResult:
        """See `Learner.update`."""
        scoring_of = partial(Scoring.of, temperature=self._temperature, kept_mass=kept_mass, entropy=entropy)

        def loss(index: int, channels_PBR: Tensor, router_shift: Tensor | None = None) -> Tensor:
            scores = scoring_of(batches[index]).scores(channels_PBR)
            return objective(index, replace(scores, router_shift=router_shift))

        self._train(True)
        if self._has_gradients:
            self._optimizer.zero_grad()
        self._has_gradients = True
        with self._snapshots.computing():
            with self._perturbing():
                channels, kept = self._schedule.run(
                    batches, sources, scoring_of, loss, router_terms, scale=self._optimizer.scale
                )
            if not self._parts.on_last_stage:
                # The gradient came from the last stage; what an objective counts and remembers has to be the same on
                # all of them.
                with torch.no_grad():
                    for index, scored in enumerate(channels):
                        loss(index, scored)
            self._verify(batches, sources, partial(self._look, batches))
        scale, result = self._optimizer.scale, self._optimizer.step(lr_scale)
        self._optimizer.zero_grad()
        self._has_gradients = False
        if router_terms is not None:
            losses = [part for routed in kept for part in routed.losses]
            result = replace(result, router_losses=self._router_losses(router_terms, losses))
        return self._noise.step(result, scale) if self._noise else result

    def _train(self, mode: bool) -> None:
        """As `Module.train` of all chunks, whose own way costs as much as forwarding a small layer."""
        for module in self._modules:
            module.__dict__["training"] = mode

    @torch.no_grad()
    def _look(self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource]) -> list[Recorded | None]:
        _, kept = self._schedule.run(batches, sources, partial(Scoring.of, temperature=self._temperature))
        return [routed.recorded for routed in kept]

    def sum_over_slices(self, values: Tensor) -> Tensor:
        """See `Learner.sum_over_slices`."""
        return self._parts.sum_over_slices(values.to(self._device))

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """See `Learner.sum_over_stages`."""
        return self._parts.sum_over_stages(values.to(self._device))
