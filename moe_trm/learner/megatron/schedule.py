"""Micro-batches through this rank's part of the model, in Megatron's own schedule, forward only or with backward.

Shape letters: B rows, R padded row length, C columns of this rank, P channels of scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moe_trm.learner.base import check_native
from moe_trm.learner.megatron.packed import packed_parameters
from moe_trm.learner.megatron.parts import Parts
from moe_trm.learner.scoring import Scoring, cut_scoring, on_device
from moe_trm.types import TokenBatch
from routing.layout.packed import AnyLayout
from routing.megatron import MegatronReplayer
from routing.record.router_shift import RouterScores
from routing.record.sources import Native, Recorded, RouteSource, row_lengths
from routing.replay.proof import locate
from routing.replay.replay_pass import ReplayPass
from routing.replay.router_losses import RouterLosses, RouterTerms

ScoringOf = Callable[[TokenBatch], Scoring]
Loss = Callable[[int, Tensor, Tensor | None], Tensor]
"""The loss of a micro-batch from its number, its `[P, B, R]` channels and its routers' shift `[B, R]`, if asked."""


@dataclass(frozen=True)
class Routed:
    """Results of one pass of this rank's routers: the routes if they were to be recorded, the scores, and the losses of
    each chunk.
    """

    recorded: Recorded | None = None
    scores: RouterScores | None = None
    losses: tuple[RouterLosses, ...] = ()


class Schedule:
    """Runs micro-batches on `wrapped`, Megatron's data-parallel wrapper. Collective over the ranks of one model.

    `replayer` is attached to it; None for a dense model.
    """

    def __init__(
        self,
        wrapped: Sequence[DistributedDataParallel],
        parts: Parts,
        replayer: MegatronReplayer | None,
        device: torch.device,
    ) -> None:
        self._wrapped, self._parts, self._replayer, self._device = wrapped, parts, replayer, device

    def run(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        scoring_of: ScoringOf,
        loss: Loss | None = None,
        router_terms: RouterTerms | None = None,
        *,
        scale: float = 1.0,
    ) -> tuple[list[Tensor], list[Routed]]:
        """All micro-batches, backward too when there is a `loss`, which only the last stage calls.

        With `router_terms`, routers add their own losses to the gradient, times `scale`.

        Returns the channels of each micro-batch, without gradient and on every rank, and what was to be kept of this
        rank's routers.
        """
        assert len(batches) == len(sources), "one route source per micro-batch"
        if not batches:
            return [], []
        step = _Step(batches, sources, self._parts, loss, self._device)
        # The interleaved schedule wants a multiple of the pipeline ranks.
        ranks = parallel_state.get_pipeline_model_parallel_world_size() if len(self._wrapped) > 1 else 1
        numbers = [*range(len(batches)), *[None] * (-len(batches) % ranks)]

        def forward(waiting: Iterator[int | None], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            number = next(waiting)
            batch, source = step.inputs(number)
            layout = step.layout(number)
            losses = None if router_terms is None else self._losses(batch, layout, router_terms, scale)
            output, this_pass = self._forward(model, batch, source, layout, scoring_of, losses)
            if number is not None and this_pass is not None:
                step.keep(number, this_pass, layout)
            return output, partial(step.finish, number, layout)

        rows, length = step.layout(0).fed
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(numbers) for _ in self._wrapped],
            model=list(self._wrapped),
            num_microbatches=len(numbers),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )
        shapes = [(len(scoring_of(batch).channels), *batch.input_ids.shape) for batch in batches]
        scored = self._parts.from_last_stage([step.channels[i] for i in sorted(step.channels)], shapes, self._device)
        return scored, [
            Routed(step.routes.get(number), step.scores.get(number), tuple(step.losses[number]))
            for number in range(len(batches))
        ]

    def _losses(self, batch: TokenBatch, layout: AnyLayout, terms: RouterTerms, scale: float) -> RouterLosses:
        lengths = torch.tensor(row_lengths(batch.valid))
        row_of, column = map(torch.from_numpy, locate(layout))
        row_of = torch.where(column < lengths[row_of], row_of, -1)
        return RouterLosses(terms, row_of, lengths, self._device, scale=scale, over_ranks=self._parts.sum_over_slices)

    def _forward(
        self,
        model: torch.nn.Module,
        batch: TokenBatch,
        source: RouteSource,
        layout: AnyLayout,
        scoring_of: ScoringOf,
        losses: RouterLosses | None,
    ) -> tuple[Tensor, ReplayPass | None]:
        moved = on_device(batch, self._device)
        scoring = cut_scoring(scoring_of(moved), layout)
        inputs = layout.cut_tokens(moved.input_ids), layout.position_ids().to(self._device), None
        latent = bool(cast(Any, model.config).multi_latent_attention)
        pack = packed_parameters(layout, self._device, latent=latent)
        options = {"labels": scoring, "packed_seq_params": pack}
        if self._replayer is None:
            check_native(source)
            return model(*inputs, **options), None
        with self._replayer.use(
            source, layout, batch.input_ids, batch.target_ids, batch.valid, model=model, samples=batch.sample_ids
        ) as this_pass:
            this_pass.losses = losses
            output: Tensor = model(*inputs, **options)
        return output, this_pass


class _Step:
    """Inputs and outputs of one run of the schedule. A micro-batch without a number is padding and trains nothing."""

    def __init__(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        parts: Parts,
        loss: Loss | None,
        device: torch.device,
    ) -> None:
        self.padded = [parts.padded(batch) for batch in batches]
        self.channels: dict[int, Tensor] = {}
        self._layouts: dict[int | None, AnyLayout] = {}
        self.routes: dict[int, Recorded] = {}
        self.scores: dict[int, RouterScores] = {}
        self.losses: dict[int, list[RouterLosses]] = defaultdict(list)
        self._shifts: dict[int, Tensor] = {}
        self._lengths = [batch.input_ids.shape[1] for batch in batches]
        self._sources, self._parts, self._loss, self._device = sources, parts, loss, device

    def inputs(self, number: int | None) -> tuple[TokenBatch, RouteSource]:
        """The padded micro-batch, and whose routes it uses."""
        if number is None:
            nothing = torch.zeros_like(self.padded[0].valid)
            empty = replace(
                self.padded[0], valid=nothing, mask=nothing, kept_ids=None, kept_offsets=None, kept_logprobs=None
            )
            return empty, Native()
        return self.padded[number], self._sources[number]

    def layout(self, number: int | None) -> AnyLayout:
        """This rank's cut of that micro-batch."""
        if number not in self._layouts:
            self._layouts[number] = self._parts.layout(self.inputs(number)[0])
        return self._layouts[number]

    def keep(self, number: int, this_pass: ReplayPass, layout: AnyLayout) -> None:
        """Remember what one chunk of the model recorded, and how far its routers have moved."""
        if this_pass.records:
            recorded, earlier = this_pass.recorded(), self.routes.get(number)
            self.routes[number] = recorded if earlier is None else earlier.with_layers_of(recorded)
        if this_pass.losses is not None:
            self.losses[number].append(this_pass.losses)
        if this_pass.watch is None:
            return
        if (scores := this_pass.watch.scores()) is not None:
            self.scores[number] = scores
        if (shift := this_pass.watch.shift()) is not None:
            # Each slice of the columns has its own tokens, and all slices run the same micro-batch now.
            summed = self._parts.sum_over_slices(layout.from_router(shift))
            self._shifts[number] = (summed * self.padded[number].mask.to(summed.device))[:, : self._lengths[number]]

    def finish(self, number: int | None, layout: AnyLayout, output: Tensor, **_non_loss_data: bool) -> Any:
        """Megatron's loss function: called with the output `[P, B, C]` of the last stage."""
        channels = self._parts.whole_rows(output, layout)
        if number is not None:
            channels = channels[..., : self._lengths[number]]
            self.channels[number] = channels.detach()
        if self._loss is None:
            return None
        value = channels.new_zeros(()) if number is None else self._loss(number, channels, self._shifts.get(number))
        if not value.requires_grad:
            # A batch without scored tokens still runs backward: the other ranks wait for its part of the expert
            # exchange.
            value = value + 0.0 * channels.sum()
        return value, torch.zeros((), dtype=torch.int, device=self._device), {}
