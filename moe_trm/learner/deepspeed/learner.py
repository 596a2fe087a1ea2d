"""The DeepSpeed learner: scores micro-batches and applies optimizer steps. Every rank holds other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.learner.base import LearnerBase, adds_in_order, check_native, replays
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.deepspeed.optimizer import DeepSpeedGuardedOptimizer
from moe_trm.learner.deepspeed.pictures import PictureInputs
from moe_trm.learner.deepspeed.state import DeepSpeedState
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.learner.scoring import Scoring, cut_scoring, on_device, whole_channels
from moe_trm.learner.snapshots import Snapshots
from moe_trm.types import TokenBatch
from routing.hf import HFReplayer
from routing.judge.sample_flips import keys_of
from routing.layout.packed import AnyLayout, PackedLayout
from routing.layout.padded import Layout
from routing.layout.rows import Rows
from routing.record.sources import Record, Recorded, RouteSource, row_lengths
from routing.replay.replay_pass import ReplayPass
from routing.replay.router_losses import RouterLosses, RouterTerms


class DeepSpeedLearner(LearnerBase):
    """`Learner` on DeepSpeed's ZeRO.

    Every call is collective over the ranks; build it with `build.build_deepspeed_learner`.

    Args:
        engine: DeepSpeed's engine around an `HfPolicy`.
        optimizer: applies the steps.
        replayer: attached to the model; None for a dense one.
        exporter: writes weights in Hugging Face form.
        snapshots: named copies of the weights.
        training: saves and restores weights and optimizer.
        temperature: of the rollout; divides the logits in every pass.
        device: where the model computes.
        packed: micro-batches are forwarded as packs of their tokens, not as padded rows.
        noise: on the inputs of layers in updates.
        pictures: of rows, for a model with a vision tower.
    """

    _replayer: HFReplayer | None

    def __init__(
        self,
        engine: Any,
        optimizer: DeepSpeedGuardedOptimizer,
        replayer: HFReplayer | None,
        exporter: HfExporter,
        snapshots: Snapshots,
        training: DeepSpeedState,
        *,
        temperature: float,
        device: torch.device,
        packed: bool = False,
        noise: LayerNoise | None = None,
        pictures: PictureInputs | None = None,
    ) -> None:
        assert dist.group.WORLD is not None, "torch.distributed must be initialised"
        one_by_one = getattr(engine.module.causal.config, "_experts_implementation", None) == "eager"
        in_order = replayer is None or not one_by_one or adds_in_order(device, replayer.top_k)
        data = DataGroup(dist.group.WORLD, device)
        super().__init__(replayer, exporter, snapshots, training, data, noise=noise, repeats_passes=in_order)
        self._engine, self._optimizer = engine, optimizer
        self._temperature, self._device, self._packed = temperature, device, packed
        self._pictures = pictures

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """See `Learner.named_modules`."""
        modules: Iterator[tuple[str, torch.nn.Module]] = self._engine.module.named_modules()
        return modules

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
        self._engine.eval()
        scoring_of = partial(Scoring.of, temperature=temperature or self._temperature, kept_mass=kept_mass)
        with self._snapshots.computing(weights):
            scores = [self._forward(batch, source, scoring_of) for batch, source in zip(batches, sources, strict=True)]
            if replays(sources):
                self._verify(batches, sources, partial(self._look, batches))
        return scores

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
        assert batches, "an optimizer step needs a micro-batch"
        self._engine.train()
        self._optimizer.begin()
        trains = torch.zeros(1, device=self._device)
        if router_terms is not None:
            trains.fill_(any(bool(batch.valid.any()) for batch in batches))
        # ZeRO averages gradients over the ranks; the objective already carries its denominators.
        scale = self._optimizer.scale * self.data_size
        losses = [] if router_terms is None else [self._losses(batch, router_terms, scale) for batch in batches]

        def note(gradient: Tensor) -> None:
            trains.logical_or_(gradient.any())

        with self._snapshots.computing():
            with self._perturbing():
                for index, (batch, source) in enumerate(zip(batches, sources, strict=True)):
                    self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
                    current = self._forward(batch, source, scoring_of, losses[index] if losses else None)
                    for scored in (current.logprobs, current.entropy):
                        if scored is not None:
                            scored.register_hook(note)  # type: ignore[no-untyped-call]
                    value = objective(index, current)
                    if not value.requires_grad:
                        # A batch without scored tokens still runs backward: the other ranks wait for its part of the
                        # reduction.
                        value = value + 0.0 * current.logprobs.sum()
                    self._engine.backward(value * self.data_size, scale_wrt_gas=False)
            self._verify(batches, sources, partial(self._look, batches))
        dist.all_reduce(trains, dist.ReduceOp.MAX)
        result = self._optimizer.step(lr_scale) if trains else self._optimizer.skip(lr_scale)
        if router_terms is not None:
            result = replace(result, router_losses=self._router_losses(router_terms, losses))
        return self._noise.step(result, scale) if self._noise else result

    @torch.no_grad()
    def _look(self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource]) -> list[Recorded | None]:
        scoring_of = partial(Scoring.of, temperature=self._temperature)
        return [
            self._forward(batch, source, scoring_of).recorded for batch, source in zip(batches, sources, strict=True)
        ]

    def _losses(self, batch: TokenBatch, terms: RouterTerms, scale: float) -> RouterLosses:
        layout = self._layout(batch)
        rows = layout.rows() if isinstance(layout, PackedLayout) else Rows.right_padded(batch.valid)
        row_of = torch.where(rows.mask().flatten(), rows.sequence_of(), -1)
        return RouterLosses(terms, row_of, torch.tensor(rows.lengths), self._device, scale=scale)

    def _forward(
        self,
        batch: TokenBatch,
        source: RouteSource,
        scoring_of: Callable[[TokenBatch], Scoring],
        losses: RouterLosses | None = None,
    ) -> Scores:
        moved, layout = on_device(batch, self._device), self._layout(batch)
        scoring = scoring_of(moved)
        inputs: tuple[Any, ...] = (layout.cut_tokens(moved.input_ids), cut_scoring(scoring, layout), layout)
        if self._pictures is not None:
            inputs += (self._pictures.of(batch, self._device),)
        if self._replayer is None:
            check_native(source)
            channels = self._engine(*inputs)
            return scoring.scores(whole_channels(channels, layout))
        with self._routed(self._replayer, batch, source, layout) as this_pass:
            this_pass.losses = losses
            channels = self._engine(*inputs)
        recorded: Recorded | None = this_pass.recorded() if isinstance(source, Record) else None
        if recorded is not None and isinstance(layout, PackedLayout):
            recorded = replace(recorded, layout=layout)
        scores = replace(scoring.scores(whole_channels(channels, layout)), recorded=recorded)
        if this_pass.watch is None:
            return scores
        shift = this_pass.watch.shift()
        return replace(
            scores,
            router=this_pass.watch.scores(),
            router_shift=None if shift is None else self._by_row(shift, layout) * moved.mask,
        )

    def _layout(self, batch: TokenBatch) -> AnyLayout:
        rows, length = batch.input_ids.shape
        return PackedLayout(tuple(row_lengths(batch.valid)), length) if self._packed else Layout(rows, length)

    @staticmethod
    def _by_row(values_N: Tensor, layout: AnyLayout) -> Tensor:
        """`[B, R]` from the order of the model, which has padded rows one after the other."""
        if isinstance(layout, PackedLayout):
            return layout.from_router(values_N)
        return values_N.view(layout.batch, layout.length)

    @staticmethod
    def _routed(
        replayer: HFReplayer, batch: TokenBatch, source: RouteSource, layout: AnyLayout
    ) -> AbstractContextManager[ReplayPass]:
        """The context of one forward, by the layout of its rows."""
        if not isinstance(layout, PackedLayout):
            return replayer.use(source, batch.input_ids, batch.target_ids, batch.valid, samples=batch.sample_ids)
        return replayer.use_rows(
            source,
            layout.rows(),
            layout.cut_tokens(batch.input_ids),
            layout.cut_tokens(batch.target_ids),
            samples=keys_of(batch.sample_ids, batch.input_ids),
        )
