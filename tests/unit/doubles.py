"""Stand-ins for an engine and a learner: the whole protocol, of which a test fills in the parts it needs.

A call that a test did not expect fails it. The type checker holds every stand-in and its overrides to the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.config.engines import EngineTraits
from moe_trm.learner.checkpoint.pieces import Piece, PieceReader
from moe_trm.learner.protocol import Learner, Scores, UpdateResult
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.sync.manifest import Share, TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, TokenBatch
from routing.record.sources import ReplayReport, RouteSource
from routing.replay.router_losses import RouterTerms


def _unexpected(name: str) -> AssertionError:
    return AssertionError(f"`{name}` was called, which this test does not expect")


class StandInLearner(Learner):
    """One rank that holds whole rows and all layers: it reduces and gathers, and does nothing else."""

    data_rank: int = 0
    data_size: int = 1
    moe_layer_ids: tuple[int, ...] = ()
    model_moe_layer_ids: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")
    is_data_leader: bool = True
    repeats_passes: bool = True

    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
        temperature: float | None = None,
    ) -> list[Scores]:
        return self.scored(batches, sources, weights)

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        """What `score` returns; without the kept mass."""
        raise _unexpected("score")

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        raise _unexpected("named_modules")

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        raise _unexpected("snapshot")

    def average(self, name: str, share: float) -> int:
        raise _unexpected("average")

    def forget(self, name: str) -> None:
        raise _unexpected("forget")

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
        raise _unexpected("update")

    def check_replicas(self) -> None:
        raise _unexpected("check_replicas")

    def replay_report(self) -> ReplayReport:
        raise _unexpected("replay_report")

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in sums.items()}

    def gather(self, values: Tensor) -> Tensor:
        return values

    def sum_over_slices(self, values: Tensor) -> Tensor:
        return values

    def sum_over_stages(self, values: Tensor) -> Tensor:
        return values

    def export_shard(self, directory: str, rounding: Rounding) -> tuple[TensorEntry, ...]:
        raise _unexpected("export_shard")

    def owned_tensors(self) -> Iterator[tuple[str, Tensor]]:
        raise _unexpected("owned_tensors")

    def state(self) -> tuple[list[Piece], Mapping[str, int]]:
        raise _unexpected("state")

    def restore(self, reader: PieceReader, counters: Mapping[str, int]) -> None:
        raise _unexpected("restore")

    def export_checkpoint(self, directory: str) -> None:
        raise _unexpected("export_checkpoint")


class StandInEngine(RolloutEngine):
    """Starts, closes and has no metrics; it samples nothing and takes no weights."""

    @property
    def traits(self) -> EngineTraits:
        return EngineTraits()

    async def start(self) -> None: ...

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        raise _unexpected("generate")

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        raise _unexpected("turn")

    async def load_weights(self, push: WeightPush) -> None:
        raise _unexpected("load_weights")

    def expect(self, version: int) -> None:
        raise _unexpected("expect")

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        raise _unexpected("receive_weights")

    async def release_memory(self) -> None:
        raise _unexpected("release_memory")

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...
