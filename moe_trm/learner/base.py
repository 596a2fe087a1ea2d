"""Parts shared by every learner: snapshots, export and restore of weights, sums over ranks, and the proof of replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.errors import ConfigError
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader
from moe_trm.learner.data_group import DataGroup
from moe_trm.learner.hf_export import HfExporter
from moe_trm.learner.layer_noise import LayerNoise
from moe_trm.learner.replicas import compare_replicas
from moe_trm.learner.snapshots import Snapshots, Weights
from moe_trm.sync.manifest import TensorEntry
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.judge.alignment import examine, refuse
from routing.judge.flip_bound import FlipBoundError
from routing.judge.sample_flips import keys_of
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayRecords, ReplayReport, RouteSource
from routing.replay.router_losses import RouterLosses, RouterTerms

Look = Callable[[Sequence[RouteSource]], Sequence[Recorded | None]]
"""A forward of the same micro-batches at the same weights, with other sources: the routes it used."""


class Replayer(Protocol):
    """Chooses and proves routes; `routing` has one for each learner."""

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def is_proved(self) -> bool: ...

    def report(self, group: dist.ProcessGroup | None = None) -> ReplayReport: ...


class Training(Weights, Protocol):
    """Saves and restores weights and optimizer."""

    def save(self) -> tuple[list[Piece], Mapping[str, int]]: ...

    def load(self, reader: PieceReader, counters: Mapping[str, int]) -> None: ...

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors; other ranks may hold copies under the same name, which also has the part where ranks
        hold different ones.
        """


def adds_in_order(device: torch.device, top_k: int) -> bool:
    """True where the outputs of a token's `top_k` experts are added in a fixed order.

    Megatron-Core adds them with `scatter_add_` (0.19.2, transformer/moe/moe_utils.py:566), and transformers' experts
    one by one with `index_add_`. On CUDA these add atomically, in any order, which three numbers or more depend on.
    """
    return device.type != "cuda" or top_k <= 2


class LearnerBase:
    """`Learner` without `score` and `update`, for ranks that hold whole rows and all layers.

    Args:
        replayer: attached to the model; None for a dense one.
        data: the ranks that hold different rows.
        model_moe_layer_ids: None: those of `replayer`.
        noise: on the inputs of layers in updates.
        repeats_passes: see `Learner`.
    """

    def __init__(
        self,
        replayer: Replayer | None,
        exporter: HfExporter,
        snapshots: Snapshots,
        training: Training,
        data: DataGroup,
        *,
        is_data_leader: bool = True,
        model_moe_layer_ids: tuple[int, ...] | None = None,
        noise: LayerNoise | None = None,
        repeats_passes: bool = True,
    ) -> None:
        self.repeats_passes = repeats_passes
        self.data_rank, self.data_size, self.is_data_leader = data.rank, data.size, is_data_leader
        self.device = data.device
        self.moe_layer_ids: tuple[int, ...] = replayer.layer_ids if replayer is not None else ()
        self.model_moe_layer_ids = self.moe_layer_ids if model_moe_layer_ids is None else model_moe_layer_ids
        self._replayer, self._exporter, self._snapshots = replayer, exporter, snapshots
        self._training, self._data, self._report = training, data, ReplayReport()
        self._noise = noise

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        """See `Learner.snapshot`."""
        return self._snapshots.take(name, saved=saved, rounding=rounding)

    def average(self, name: str, share: float) -> int:
        """See `Learner.average`."""
        return self._snapshots.blend(name, share)

    def forget(self, name: str) -> None:
        """See `Learner.forget`."""
        self._snapshots.forget(name)

    def replay_report(self) -> ReplayReport:
        """See `Learner.replay_report`."""
        # `score` and `update` prove what they replay, on all ranks together: nothing is left to ask of the others.
        if self._replayer is not None and not self._replayer.is_proved:
            self._verify()
        report, self._report = self._report, ReplayReport()
        return report

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """See `Learner.reduce`."""
        return self._data.reduce(sums)

    def gather(self, values: Tensor) -> Tensor:
        """See `Learner.gather`."""
        return self._data.gather(values)

    def sum_over_slices(self, values: Tensor) -> Tensor:
        """See `Learner.sum_over_slices`: rows are whole here."""
        return values

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """See `Learner.sum_over_stages`: every rank holds all layers."""
        return values

    def check_replicas(self) -> None:
        """See `Learner.check_replicas`."""
        compare_replicas(self._training.held(), self.device)

    def export_shard(self, directory: str, rounding: Rounding) -> tuple[TensorEntry, ...]:
        """See `Learner.export_shard`."""
        return self._exporter.write_push(Path(directory), rounding)

    def owned_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.owned_tensors`."""
        return self._exporter.tensors()

    def export_checkpoint(self, directory: str) -> None:
        """See `Learner.export_checkpoint`; all ranks must see `directory`. Weights are in the learner's dtype."""
        self._exporter.write_checkpoint(Path(directory))

    def state(self) -> tuple[list[Piece], Mapping[str, int]]:
        """See `Learner.state`."""
        pieces, counters = self._training.save()
        noise, steps = self._noise.save() if self._noise else ([], {})
        return [*pieces, *self._snapshots.save(self._training), *noise], {**counters, **steps}

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        """See `Learner.restore`."""
        self._snapshots.load(self._training, reader)
        self._training.load(reader, counters)
        if self._noise:
            self._noise.load(reader, counters)

    def _perturbing(self) -> AbstractContextManager[None]:
        """The context of an update's forward and backward passes."""
        return self._noise.perturbing() if self._noise else nullcontext()

    def _router_losses(self, terms: RouterTerms, losses: Sequence[RouterLosses]) -> RouterTerms:
        """The routers' losses of an update, times `terms`, over all ranks. Collective."""
        sums = sum((part.sums for part in losses), torch.zeros(2, dtype=torch.float64, device=self.device))
        sums = self.sum_over_stages(self.sum_over_slices(sums))
        reduced = self.reduce({"balance": sums[0], "z": sums[1]})
        return RouterTerms(terms.balance * reduced["balance"], terms.z * reduced["z"])

    def _verify(
        self, batches: Sequence[TokenBatch] = (), sources: Sequence[RouteSource] = (), look: Look | None = None
    ) -> None:
        """Prove every replayed forward of `batches`, those since the last call; raises `ReplayProofError`.

        The one device synchronisation of the proof. Samples beyond the bound on flips are forwarded again by `look`,
        with the live router: wrong routes stop the step, a router that has moved is counted (`ReplayReport.moved`).
        Without `look`, the bound itself stops the step.
        """
        if self._replayer is None:
            return
        try:
            self._report += self._replayer.report(dist.group.WORLD)
        except FlipBoundError as doubt:
            if look is None:
                raise
            findings = examine(
                doubt,
                [keys_of(batch.sample_ids, batch.input_ids) for batch in batches],
                sources,
                look([Record()] * len(batches)),
                self._replayer.num_layers,
                dist.group.WORLD,
                self._data.device,
            )
            self._report += refuse(doubt, findings)


def replays(sources: Sequence[RouteSource]) -> bool:
    """True when passes with `sources` have something to prove."""
    return any(isinstance(source, ReplayRecords | ReplayRecorded) for source in sources)


def check_native(source: RouteSource) -> None:
    """Raise `ConfigError` unless a dense model is asked for nothing but its own forward."""
    if not isinstance(source, Native):
        raise ConfigError(
            "routes of a dense model were asked for",
            where="replay.mode",
            got=type(source).__name__,
            expected="Native",
            fix="Set replay.mode=none.",
        )
