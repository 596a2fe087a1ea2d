"""The Megatron-Core learner: scores micro-batches, applies optimizer steps, exports weights. Shape letters: B rows, R padded row length."""

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

from moe_trm.errors import ConfigError
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.megatron.optimizer import GuardedOptimizer
from moe_trm.learner.megatron.policy import PolicyModel
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.learner.scoring import Scoring, on_device
from moe_trm.learner.snapshots import Snapshots
from moe_trm.sync.manifest import TensorEntry
from moe_trm.types import TokenBatch
from routing.layout import Layout
from routing.megatron import MegatronReplayer
from routing.replay import Native, Record, Recorded, ReplayReport, RouteSource

Job = tuple[int, TokenBatch, RouteSource]


class MegatronLearner:
    """`Learner` on Megatron-Core. Every call is collective over the ranks; build it with `build.build_megatron_learner`.

    Args:
        policy: the model, also reachable through `wrapped`.
        wrapped: `policy` inside Megatron's data-parallel wrapper.
        optimizer: applies the steps.
        replayer: attached to `wrapped`; None for a dense model.
        exporter: writes weights in Hugging Face form.
        temperature: of the rollout; divides the logits in every pass.
        device: where the model lives.
    """

    def __init__(
        self,
        policy: PolicyModel,
        wrapped: DistributedDataParallel,
        optimizer: GuardedOptimizer,
        replayer: MegatronReplayer | None,
        exporter: HfExporter,
        *,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._policy, self._wrapped, self._optimizer = policy, wrapped, optimizer
        self._replayer, self._exporter, self._report = replayer, exporter, ReplayReport()
        self._temperature, self._device = temperature, device
        self._snapshots = Snapshots([policy])
        self._data = DataGroup(parallel_state.get_data_parallel_group(), device)
        self.data_rank, self.data_size = self._data.rank, self._data.size
        self.moe_layer_ids: tuple[int, ...] = replayer.layer_ids if replayer is not None else ()

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

        def collect(index: int, recorded: Recorded | None, output: Tensor, **_non_loss_data: bool) -> Scores:
            return replace(self._scores(batches[index], output, kept_mass=kept_mass), recorded=recorded)

        self._wrapped.eval()
        with self._snapshots.using(weights):
            results: list[Scores] = self._run(batches, sources, collect, kept_mass=kept_mass, forward_only=True)
        return results

    def snapshot(self, name: str) -> None:
        """See `Learner.snapshot`."""
        self._snapshots.take(name)

    def forget(self, name: str) -> None:
        """See `Learner.forget`."""
        self._snapshots.forget(name)

    def update(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], objective: Callable[[int, Scores], Tensor]
    ) -> UpdateResult:
        """See `Learner.update`."""

        def loss(index: int, _recorded: Recorded | None, output: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            current = self._scores(batches[index], output, kept_mass=False)
            value = objective(index, current)
            if not value.requires_grad:
                # A batch without scored tokens still runs backward: the other ranks wait for its part of the expert exchange.
                value = value + 0.0 * current.logprobs.sum()
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        self._wrapped.train()
        self._optimizer.zero_grad()
        self._run(batches, sources, loss, kept_mass=False, forward_only=False)
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

    def export_shard(self, directory: str, dtype: str) -> tuple[TensorEntry, ...]:
        """See `Learner.export_shard`."""
        return self._exporter.write_shard(Path(directory), dtype)

    def owned_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.owned_tensors`."""
        return self._exporter.tensors()

    def export_checkpoint(self, directory: str) -> None:
        """See `Learner.export_checkpoint`; all ranks must see `directory`. Weights are in the learner's dtype."""
        self._exporter.write_checkpoint(Path(directory))

    def _verify(self) -> None:
        """Prove every replayed forward since the last call; raises `ReplayProofError`. The one device synchronisation of the proof."""
        if self._replayer is not None:
            self._report += self._replayer.report(dist.group.WORLD)

    def _run(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        finish: Callable[..., Any],
        *,
        kept_mass: bool,
        forward_only: bool,
    ) -> list[Any]:
        """All micro-batches through Megatron's schedule; `finish(index, output)` ends each one."""
        assert len(batches) == len(sources), "one route source per micro-batch"
        if not batches:
            return []

        def forward(jobs: Iterator[Job], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            index, batch, source = next(jobs)
            output, recorded = self._forward(model, batch, source, kept_mass=kept_mass)
            return output, partial(finish, index, recorded)

        rows, length = batches[0].input_ids.shape
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(list(zip(range(len(batches)), batches, sources, strict=True))),
            model=[self._wrapped],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _forward(
        self, model: torch.nn.Module, batch: TokenBatch, source: RouteSource, *, kept_mass: bool
    ) -> tuple[Tensor, Recorded | None]:
        moved = on_device(batch, self._device)
        positions = torch.arange(batch.input_ids.shape[1], device=self._device).expand_as(moved.input_ids)
        scoring = Scoring.of(moved, self._temperature, kept_mass=kept_mass)
        if self._replayer is None:
            if not isinstance(source, Native):
                raise ConfigError(
                    "routes of a dense model were asked for",
                    where="replay.mode",
                    got=type(source).__name__,
                    expected="Native",
                    fix="Set replay.mode=none.",
                )
            return model(moved.input_ids, positions, None, labels=scoring), None
        layout = Layout(*batch.input_ids.shape)
        with self._replayer.use(source, layout, batch.input_ids, batch.target_ids, batch.valid) as this_pass:
            output: Tensor = model(moved.input_ids, positions, None, labels=scoring)
        return output, this_pass.recorded() if isinstance(source, Record) else None

    def _scores(self, batch: TokenBatch, output: Tensor, *, kept_mass: bool) -> Scores:
        return Scoring.of(batch, self._temperature, kept_mass=kept_mass).scores(output)
