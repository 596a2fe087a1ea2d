"""Runs cases one after the other on one real learner rank: `driver.py CONFIG BUNDLE OUT CASE [CASE ...]`.

Each case is two steps of a recorded run by configuration alone. Nothing is asserted here: metrics and the float64
result of each update go to OUT/CASE.json for the tests to judge.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.config import load
from moe_trm.config.schema import Config
from moe_trm.learner.checkpoint.resumption import Checkpoints
from moe_trm.learner.megatron.build import build_megatron_learner, close_learner
from moe_trm.learner.megatron.learner import MegatronLearner
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.loop import train
from moe_trm.observe.sinks import Sink
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.rank_share import rank_share
from moe_trm.runtime.interruption import Interruption
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import TokenBatch, TrainBatch
from tests.integration.learner_support.groups import leave_groups
from tests.integration.objective_support.cases import REWARD, all_cases
from tests.integration.objective_support.recompute import recompute


class LocalRollouts:
    """The controller in this process, as the loop knows it."""

    def __init__(self, controller: RolloutController, loop: asyncio.AbstractEventLoop) -> None:
        self._controller, self._loop = controller, loop

    def next_batch(self, step: int, layer_ids: tuple[int, ...], part: int = 0) -> TrainBatch:
        return rank_share(self._loop.run_until_complete(self._controller.plan(step, 1, part))[0], layer_ids)

    def evaluate(self, version: int) -> dict[str, float]:
        return {}

    def push(self, version: int) -> None:
        self._loop.run_until_complete(self._controller.load_weights(WeightPush(version, "", ())))

    def state(self) -> dict[str, Any]:
        return self._controller.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._controller.restore(state)

    def close(self) -> None:
        self._loop.run_until_complete(self._controller.close())


class Witness:
    """The learner, with each update recomputed at the same weights before it is applied."""

    def __init__(self, learner: MegatronLearner, config: Config) -> None:
        self._learner, self._config = learner, config
        self._anchors: dict[int, tuple[TokenBatch, Tensor]] = {}
        """First log-probs of each batch by the identity of its mask, which outlives new advantages.

        The batch is kept, so that no other one can have it."""
        self.updates: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def score(self, batches: Sequence[TokenBatch], sources: Sequence[Any], **options: Any) -> list[Scores]:
        scores = self._learner.score(batches, sources, **options)
        for batch, score in zip(batches, scores, strict=True):
            self._anchors.setdefault(id(batch.mask), (batch, score.logprobs.detach().clone()))
        return scores

    def update(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[Any],
        objective: Callable[[int, Scores], Tensor],
        **options: Any,
    ) -> UpdateResult:
        current: dict[int, Scores] = {}

        def nothing(index: int, scores: Scores) -> Tensor:
            current[index] = scores
            return 0 * scores.logprobs.sum()

        def linear(index: int, scores: Scores) -> Tensor:
            return (expected.coefficients[index].float() * scores.logprobs).sum()

        self._norm_of(batches, sources, nothing, options)
        scored = [_detached(current[index]) for index in range(len(batches))]
        # Where no anchor pass was made, the update's own forward is the anchor.
        anchors = [
            self._anchors.get(id(batch.mask), (batch, score.logprobs))[1]
            for batch, score in zip(batches, scored, strict=True)
        ]
        expected = recompute(self._config, batches, anchors, scored)
        norm = self._norm_of(batches, sources, linear, options)
        done = self._learner.update(batches, sources, objective, **options)
        self.updates.append(
            {
                "grad_norm": done.grad_norm,
                "expected_grad_norm": norm,
                "num_kept": expected.num_kept,
                "num_tokens": expected.num_tokens,
                "rows": _rows(batches),
            }
        )
        return done

    def _norm_of(
        self, batches: Sequence[TokenBatch], sources: Sequence[Any], objective: Any, options: Mapping[str, Any]
    ) -> float:
        """The gradient norm of `objective` at the present weights, which stay."""
        optimizer = self._learner._optimizer
        apply = optimizer.step

        def measure(lr_scale: float = 1.0) -> UpdateResult:
            optimizer.megatron.prepare_grads()
            return UpdateResult(float(optimizer.megatron.get_grad_norm()), lr_scale, False)

        optimizer.step = measure  # type: ignore[method-assign]
        try:
            return self._learner.update(batches, sources, objective, **options).grad_norm
        finally:
            optimizer.step = apply  # type: ignore[method-assign]


class Keep(Sink):
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float | str]] = []

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self.rows.append({"step": step, **metrics})


def _detached(scores: Scores) -> Scores:
    entropy = None if scores.entropy is None else scores.entropy.detach().clone()
    return Scores(scores.logprobs.detach().clone(), entropy=entropy, router_shift=scores.router_shift)


def _rows(batches: Sequence[TokenBatch]) -> list[tuple[int, float, float]]:
    """Group, reward and advantage of each row."""
    found = []
    for batch in batches:
        assert batch.group_ids is not None
        assert batch.rewards is not None
        for i in batch.mask.any(dim=1).nonzero()[:, 0].tolist():
            advantage = float(batch.advantages[i][batch.mask[i]][0])
            found.append((int(batch.group_ids[i]), float(batch.rewards[i]), advantage))
    return found


def run_case(path: str, bundle: str, out: Path, name: str) -> None:
    overrides = [
        *(f"name={name}", "rollout.engine=bundle", f"rollout.bundle={bundle}", "learner.parallel.expert=1"),
        *(
            "probe.every=0",
            "probe.save=false",
            "correction.rules=[]",
            "checkpoint.every=0",
            "optimizer.lr=1e-3",
            "optimizer.warmup_steps=0",
            "replay.max_local_flip_rate=1.0",
        ),
        *REWARD,
        *all_cases()[name],
    ]
    config = load(path, overrides)
    leave_groups()
    torch.manual_seed(config.seed)
    witness, sink = Witness(build_megatron_learner(config), config), Keep()
    events = asyncio.new_event_loop()
    controller = events.run_until_complete(build_controller(config, None))
    events.run_until_complete(controller.start())
    rollouts = LocalRollouts(controller, events)
    checkpoints = Checkpoints(config, out / name, Interruption())
    train(config, witness, rollouts, rollouts, [sink], checkpoints, mode="R3", run_dir=out)  # type: ignore[arg-type]
    checkpoints.close()
    rollouts.close()
    events.close()
    (out / f"{name}.json").write_text(json.dumps({"metrics": sink.rows, "updates": witness.updates}))


if __name__ == "__main__":
    config_path, bundle_path, out_path, *names = sys.argv[1:]
    for case in names:
        run_case(config_path, bundle_path, Path(out_path), case)
    close_learner()
