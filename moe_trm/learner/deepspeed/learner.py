"""The DeepSpeed learner: scores micro-batches, applies optimizer steps, exports weights. Every rank holds other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.checkpoint.pieces import Piece, PieceReader
from moe_trm.errors import ConfigError
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.deepspeed.optimizer import GuardedOptimizer
from moe_trm.learner.deepspeed.state import TrainingState
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.learner.scoring import Scoring, on_device
from moe_trm.learner.snapshots import Snapshots
from moe_trm.sync.manifest import TensorEntry
from moe_trm.types import TokenBatch
from routing.hf import HFReplayer
from routing.replay import Native, Record, Recorded, ReplayReport, RouteSource


class DeepSpeedLearner:
    """`Learner` on DeepSpeed's ZeRO. Every call is collective over the ranks; build it with `build.build_deepspeed_learner`.

    Args:
        engine: DeepSpeed's engine around an `HfPolicy`.
        optimizer: applies the steps.
        replayer: attached to the model; None for a dense one.
        exporter: writes weights in Hugging Face form.
        snapshots: named copies of the weights.
        training: saves and restores weights and optimizer.
        temperature: of the rollout; divides the logits in every pass.
        device: where the model computes.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: GuardedOptimizer,
        replayer: HFReplayer | None,
        exporter: HfExporter,
        snapshots: Snapshots,
        training: TrainingState,
        *,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._engine, self._optimizer, self._replayer = engine, optimizer, replayer
        self._exporter, self._snapshots, self._report = exporter, snapshots, ReplayReport()
        self._training, self._temperature, self._device = training, temperature, device
        assert dist.group.WORLD is not None, "torch.distributed must be initialised"
        self._data = DataGroup(dist.group.WORLD, device)
        self.data_rank, self.data_size, self.leads = self._data.rank, self._data.size, True
        self.moe_layer_ids: tuple[int, ...] = replayer.layer_ids if replayer is not None else ()
        self.model_moe_layer_ids = self.moe_layer_ids

    @torch.no_grad()
    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
    ) -> list[Scores]:
        """See `Learner.score`."""
        self._engine.eval()
        scoring_of = partial(Scoring.of, temperature=self._temperature, kept_mass=kept_mass)
        with self._snapshots.using(weights):
            return [self._forward(batch, source, scoring_of) for batch, source in zip(batches, sources, strict=True)]

    def snapshot(self, name: str, *, saved: bool = False, rounded_to: str | None = None) -> int:
        """See `Learner.snapshot`."""
        return self._snapshots.take(name, saved=saved, rounded_to=rounded_to)

    def forget(self, name: str) -> None:
        """See `Learner.forget`."""
        self._snapshots.forget(name)

    def update(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        objective: Callable[[int, Scores], Tensor],
        *,
        entropy: bool = False,
        lr_scale: float = 1.0,
    ) -> UpdateResult:
        """See `Learner.update`."""
        scoring_of = partial(Scoring.of, temperature=self._temperature, entropy=entropy)
        assert batches, "an optimizer step needs a micro-batch"
        self._engine.train()
        self._optimizer.begin()
        for index, (batch, source) in enumerate(zip(batches, sources, strict=True)):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            current = self._forward(batch, source, scoring_of)
            value = objective(index, current)
            if not value.requires_grad:
                # A batch without scored tokens still runs backward: the other ranks wait for its part of the reduction.
                value = value + 0.0 * current.logprobs.sum()
            # ZeRO averages gradients over the ranks; the objective already carries its denominators.
            self._engine.backward(value * self.data_size, scale_wrt_gas=False)
        self._verify()
        return self._optimizer.step(lr_scale)

    def replay_report(self) -> ReplayReport:
        """See `Learner.replay_report`."""
        self._verify()
        report, self._report = self._report, ReplayReport()
        return report

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """See `Learner.reduce`."""
        return self._data.reduce(sums)

    def gather(self, values: Tensor) -> Tensor:
        """See `Learner.gather`."""
        return self._data.gather(values)

    def over_slices(self, values: Tensor) -> Tensor:
        """See `Learner.over_slices`: rows are whole here."""
        return values

    def over_stages(self, values: Tensor) -> Tensor:
        """See `Learner.over_stages`: every rank holds all layers."""
        return values

    def export_shard(self, directory: str, dtype: str) -> tuple[TensorEntry, ...]:
        """See `Learner.export_shard`."""
        return self._exporter.write_shard(Path(directory), dtype)

    def owned_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.owned_tensors`."""
        return self._exporter.tensors()

    def export_checkpoint(self, directory: str) -> None:
        """See `Learner.export_checkpoint`; all ranks must see `directory`. Weights are in the learner's dtype."""
        self._exporter.write_checkpoint(Path(directory))

    def state(self) -> tuple[list[Piece], Mapping[str, int]]:
        """See `Learner.state`."""
        pieces, counters = self._training.save()
        return [*pieces, *self._snapshots.save(self._training)], counters

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """See `Learner.restore`."""
        self._snapshots.load(self._training, reader)
        self._training.load(reader, counters)

    def _verify(self) -> None:
        """Prove every replayed forward since the last call; raises `ReplayProofError`. The one device synchronisation of the proof."""
        if self._replayer is not None:
            self._report += self._replayer.report(dist.group.WORLD)

    def _forward(self, batch: TokenBatch, source: RouteSource, scoring_of: Callable[[TokenBatch], Scoring]) -> Scores:
        moved = on_device(batch, self._device)
        scoring = scoring_of(moved)
        if self._replayer is None:
            if not isinstance(source, Native):
                raise ConfigError(
                    "routes of a dense model were asked for",
                    where="replay.mode",
                    got=type(source).__name__,
                    expected="Native",
                    fix="Set replay.mode=none.",
                )
            return scoring.scores(self._engine(moved.input_ids, scoring))
        with self._replayer.use(source, batch.input_ids, batch.target_ids, batch.valid) as this_pass:
            planes_PBR = self._engine(moved.input_ids, scoring)
        recorded: Recorded | None = this_pass.recorded() if isinstance(source, Record) else None
        return replace(scoring.scores(planes_PBR), recorded=recorded)
