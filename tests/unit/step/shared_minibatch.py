"""One minibatch of made-up rows that ranks share in any way: its losses, gradients and metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config, Recovery
from moe_trm.learner.protocol import Scores
from moe_trm.learner.scoring import FED, on_device
from moe_trm.methods import summable
from moe_trm.step.advantages import Advantages
from moe_trm.step.objective import TERMS, Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.reference import Reference
from moe_trm.sync.rounding import Rounding
from moe_trm.types import MiniBatch, RewardedSample, TokenBatch, TrainRow
from routing.record.sources import Native, RouteSource
from tests.unit.advantages import estimator, valued
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record


class Ranks:
    """Data-parallel ranks as threads that meet in every collective."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._slots = size, threading.Barrier(size, timeout=60), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


class FakeLearner(StandInLearner):
    """Log-probs that depend on the token alone: the same whatever rank or micro-batch it is in."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.data_rank, self.data_size = ranks, rank, ranks.size
        self.snapshots: list[str] = []

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        assert rounding is None
        self.snapshots.append(name)
        return 0

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        if weights is None:
            return [Scores(current_logprobs(batch)) for batch in batches]
        assert weights in self.snapshots
        assert all(isinstance(source, Native) for source in sources), "the reference uses its own routes"
        return [Scores(reference_logprobs(batch)) for batch in batches]

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in summable.add(self._ranks.exchange(self.data_rank, sums)).items()}

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._ranks.exchange(self.data_rank, values))


def drift(batch: TokenBatch, scale: float) -> Tensor:
    """Deterministic noise from token and position."""
    position = torch.arange(batch.mask.shape[1])
    noise = scale * torch.sin(7.0 * batch.target_ids + 3.0 * position + 11.0 * batch.input_ids)
    return noise.to(batch.mask.device)


def anchor_logprobs(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, batch.rollout_logprobs + drift(batch, 0.3), 0.0)


def current_logprobs(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, anchor_logprobs(batch) + drift(batch, 0.5).cos() - 1 + drift(batch, 0.2), 0.0)


def reference_logprobs(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, batch.rollout_logprobs - drift(batch, 0.4).abs(), 0.0)


def entropies(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, 2.0 + drift(batch, 0.7), 0.0)


def rows() -> list[TrainRow]:
    made = [
        make_record(sample_id=i, group_id=i // 4, num_sampled=3 + i % 7, reward=float(i % 3 == 0)) for i in range(12)
    ]
    return [TrainRow(record) for record in made]


def by_reward(row: TrainRow) -> float:
    """The advantage of a made-up row."""
    return 1.0 if row.record.reward else -0.5


def config(**changes: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "none"}, **changes})


def outcome(
    settings: Config,
    *,
    ranks: int,
    micro_batch_rows: int,
    first: bool = False,
    steps: int = 1,
    given: Sequence[TrainRow] | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Loss, gradient and keep mask by row, and metrics of rank 0, of one minibatch shared in this way.

    `given`: its rows; None: `rows()`. `packed`: cut as for packs.
    """
    own, cut = given or rows(), micro_batch_rows
    shares = plan_step(own, seed=0, step=1, minibatches=1, data_size=ranks, micro_batch_rows=cut, packed=packed)
    meeting, results = Ranks(ranks), [dict[str, Any]() for _ in range(ranks)]

    def work(rank: int) -> None:
        learner, objective = FakeLearner(meeting, rank), Objective(settings)
        reference = Reference(settings, learner)
        for _ in range(steps):
            results[rank] = one_update(
                objective,
                learner,
                shares[rank][0],
                first=first,
                reference=reference,
                recovery=settings.pipeline.recovery,
                lowered=(estimator(settings), rewarded_samples("grpo", [row.record for row in given or rows()])),
            )

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))
    gradients = {key: value for result in results for key, value in result["gradients"].items()}
    return {
        "loss": sum(result["loss"] for result in results),
        "gradients": gradients,
        "entropy_gradients": {key: value for result in results for key, value in result["entropy_gradients"].items()},
        "metrics": results[0]["metrics"],
    }


def one_update(
    objective: Objective,
    learner: FakeLearner,
    mini: MiniBatch,
    *,
    first: bool,
    reference: Reference | None = None,
    recovery: Recovery = "same",
    lowered: tuple[Advantages, Sequence[RewardedSample]] | None = None,
) -> dict[str, Any]:
    """`lowered`: what gives the advantages anew where a KL lowers the rewards."""
    batches = [
        on_device(valued(micro.rows, *map(by_reward, micro.rows)), learner.device, stay=FED)
        for micro in mini.micro_batches
    ]
    scores = [Scores((current_logprobs if first else anchor_logprobs)(batch)) for batch in batches]
    part = AnchoredMinibatch(mini, batches, scores, [Native()] * len(batches), recovery=recovery)
    if reference is not None:
        [part] = reference.add_logprobs(learner, [part])
        if (penalties := reference.kl_penalties([part])) is not None:
            assert lowered is not None
            [part] = lowered[0].add_advantages(learner, [part], (lowered[1],), penalties)
    loss_of = objective.bind(part, learner, first=first)
    total, gradients, entropy_gradients = 0.0, dict[int, Tensor](), dict[int, Tensor]()
    for index, (batch, micro) in enumerate(zip(part.batches, mini.micro_batches, strict=True)):
        current, entropy = current_logprobs(batch).requires_grad_(), entropies(batch).requires_grad_()
        now = Scores(current, entropy=entropy if objective.needs_entropy else None)
        if objective.watches_routers:
            now = replace(now, router_shift=entropies(batch) / 10)
        loss = loss_of(index, now)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
        for values, found in ((current, gradients), (entropy, entropy_gradients)):
            gradient = torch.zeros_like(values) if values.grad is None else values.grad
            for i, row in enumerate(micro.rows):
                found[row.record.row_id] = gradient[i][batch.mask[i]]
    metrics = objective.take(learner)
    metrics |= reference.adapt(metrics, mini.num_sequences) if reference else {}
    return {"loss": total, "gradients": gradients, "entropy_gradients": entropy_gradients, "metrics": metrics}


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5, abs=1e-7)
    assert one["gradients"].keys() == two["gradients"].keys()
    for sample, gradient in one["gradients"].items():
        assert torch.equal(gradient != 0, two["gradients"][sample] != 0), f"another keep mask in row {sample}"
        torch.testing.assert_close(gradient, two["gradients"][sample], rtol=1e-4, atol=1e-7)
    assert one["metrics"].keys() == two["metrics"].keys()
    for key, value in one["metrics"].items():
        if key not in TERMS:
            assert value == pytest.approx(two["metrics"][key], rel=1e-4, abs=1e-6), key
