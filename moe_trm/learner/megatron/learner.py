"""The Megatron-Core learner: scores micro-batches, applies optimizer steps, exports weights.

Shape letters: B rows, R padded row length, C columns of this rank, P planes of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moe_trm.checkpoint.pieces import Piece, PieceReader
from moe_trm.errors import ConfigError
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.megatron.optimizer import GuardedOptimizer
from moe_trm.learner.megatron.parts import Parts, cut_scoring
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.megatron.state import TrainingState
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.learner.scoring import Scoring, on_device
from moe_trm.learner.snapshots import Snapshots
from moe_trm.sync.manifest import TensorEntry
from moe_trm.types import TokenBatch
from routing.layout import Layout
from routing.megatron import MegatronReplayer
from routing.megatron_checks import all_moe_layer_ids
from routing.replay import Native, Record, Recorded, ReplayReport, RouteSource

Job = tuple[int, TokenBatch, RouteSource]


class MegatronLearner:
    """`Learner` on Megatron-Core. Every call is collective over the ranks; build it with `build.build_megatron_learner`.

    Args:
        chunks: this rank's part of the model, one chunk per virtual pipeline stage.
        wrapped: `chunks` inside Megatron's data-parallel wrapper.
        optimizer: applies the steps.
        replayer: attached to `wrapped`; None for a dense model.
        exporter: writes weights in Hugging Face form.
        training: saves and restores weights and optimizer.
        temperature: of the rollout; divides the logits in every pass.
        device: where the model lives.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        wrapped: Sequence[DistributedDataParallel],
        optimizer: GuardedOptimizer,
        replayer: MegatronReplayer | None,
        exporter: HfExporter,
        training: TrainingState,
        *,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._chunks, self._wrapped, self._optimizer = chunks, wrapped, optimizer
        self._replayer, self._exporter, self._report = replayer, exporter, ReplayReport()
        self._training, self._temperature, self._device = training, temperature, device
        self._snapshots = Snapshots(chunks)
        self._data = DataGroup(parallel_state.get_data_parallel_group(), device)
        self._parts = Parts()
        self.data_rank, self.data_size, self.leads = self._data.rank, self._data.size, self._parts.leads
        self.moe_layer_ids: tuple[int, ...] = replayer.layer_ids if replayer is not None else ()
        self.model_moe_layer_ids = all_moe_layer_ids(chunks[0].config) if replayer is not None else ()

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
        for chunk in self._wrapped:
            chunk.eval()
        scoring_of = partial(Scoring.of, temperature=self._temperature, kept_mass=kept_mass)
        with self._snapshots.using(weights):
            planes, recorded = self._run(batches, sources, None, scoring_of)
        return [
            replace(scoring_of(batch).scores(scored), recorded=routes)
            for batch, scored, routes in zip(batches, planes, recorded, strict=True)
        ]

    def snapshot(self, name: str) -> int:
        """See `Learner.snapshot`."""
        return self._snapshots.take(name)

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
    ) -> UpdateResult:
        """See `Learner.update`."""
        scoring_of = partial(Scoring.of, temperature=self._temperature, entropy=entropy)

        def loss(index: int, planes_PBR: Tensor) -> Tensor:
            return objective(index, scoring_of(batches[index]).scores(planes_PBR))

        for chunk in self._wrapped:
            chunk.train()
        self._optimizer.zero_grad()
        planes, _ = self._run(batches, sources, loss, scoring_of)
        if not self._parts.on_last_stage:
            # The gradient came from the last stage; what an objective counts and remembers has to be the same on all of them.
            with torch.no_grad():
                for index, scored in enumerate(planes):
                    loss(index, scored)
        self._verify()
        result = self._optimizer.step()
        self._optimizer.zero_grad()
        return result

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
        """See `Learner.over_slices`."""
        return self._parts.over_slices(values.to(self._device))

    def over_stages(self, values: Tensor) -> Tensor:
        """See `Learner.over_stages`."""
        return self._parts.over_stages(values.to(self._device))

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
        return self._training.save()

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """See `Learner.restore`."""
        self._training.load(reader, counters)

    def _verify(self) -> None:
        """Prove every replayed forward since the last call; raises `ReplayProofError`. The one device synchronisation of the proof."""
        if self._replayer is not None:
            self._report += self._replayer.report(dist.group.WORLD)

    def _run(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        loss: Callable[[int, Tensor], Tensor] | None,
        scoring_of: Callable[[TokenBatch], Scoring],
    ) -> tuple[list[Tensor], list[Recorded | None]]:
        """All micro-batches through Megatron's schedule, backward too when there is a `loss(index, planes)`.

        Returns the `[P, B, R]` planes of each micro-batch, without gradient and on every rank, and the routes of this rank's layers where
        they were to be recorded.
        """
        assert len(batches) == len(sources), "one route source per micro-batch"
        if not batches:
            return [], []
        padded = [self._parts.padded(batch) for batch in batches]
        jobs = list(zip(range(len(batches)), padded, sources, strict=True))
        # The interleaved schedule wants as many micro-batches as there are stages.
        missing = parallel_state.get_pipeline_model_parallel_world_size() - len(jobs) if len(self._wrapped) > 1 else 0
        jobs += [(-1, _emptied(padded[0]), Native())] * missing
        found: dict[int, Tensor] = {}
        routes: dict[int, Recorded] = {}

        def forward(waiting: Iterator[Job], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            index, batch, source = next(waiting)
            layout = self._parts.layout(batch)
            output, recorded = self._forward(model, batch, source, layout, scoring_of)
            if recorded is not None:
                routes[index] = routes[index].with_layers_of(recorded) if index in routes else recorded
            return output, partial(finish, index, layout)

        def finish(index: int, layout: Layout, output: Tensor, **_non_loss_data: bool) -> Any:
            planes = self._parts.whole_rows(output, layout)
            if index >= 0:
                planes = planes[..., : batches[index].input_ids.shape[1]]
                found[index] = planes.detach()
            if loss is None:
                return None
            value = loss(index, planes) if index >= 0 else planes.new_zeros(())
            if not value.requires_grad:
                # A batch without scored tokens still runs backward: the other ranks wait for its part of the expert exchange.
                value = value + 0.0 * planes.sum()
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        rows, length = padded[0].input_ids.shape
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(jobs) for _ in self._wrapped],
            model=list(self._wrapped),
            num_microbatches=len(jobs),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )
        planes = scoring_of(batches[0]).planes
        shapes = [(len(planes), *batch.input_ids.shape) for batch in batches]
        scored = self._parts.from_last_stage([found[index] for index in sorted(found)], shapes, self._device)
        return scored, [routes.get(index) for index in range(len(batches))]

    def _forward(
        self,
        model: torch.nn.Module,
        batch: TokenBatch,
        source: RouteSource,
        layout: Layout,
        scoring_of: Callable[[TokenBatch], Scoring],
    ) -> tuple[Tensor, Recorded | None]:
        moved = on_device(batch, self._device)
        positions = torch.arange(batch.input_ids.shape[1], device=self._device).expand_as(moved.input_ids)
        scoring = cut_scoring(scoring_of(moved), layout)
        inputs = layout.cut_tokens(moved.input_ids), layout.cut_tokens(positions), None
        if self._replayer is None:
            if not isinstance(source, Native):
                raise ConfigError(
                    "routes of a dense model were asked for",
                    where="replay.mode",
                    got=type(source).__name__,
                    expected="Native",
                    fix="Set replay.mode=none.",
                )
            return model(*inputs, labels=scoring), None
        with self._replayer.use(
            source, layout, batch.input_ids, batch.target_ids, batch.valid, model=model
        ) as this_pass:
            output: Tensor = model(*inputs, labels=scoring)
        return output, this_pass.recorded() if isinstance(source, Record) else None


def _emptied(batch: TokenBatch) -> TokenBatch:
    """`batch` as padding only."""
    nothing = torch.zeros_like(batch.valid)
    return replace(batch, valid=nothing, mask=nothing, kept_ids=None, kept_offsets=None, kept_logprobs=None)
