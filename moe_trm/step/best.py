"""The weights of the best evaluation, kept as a Hugging Face checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from moe_trm.config.schema import EvalConfig, RolloutConfig, TaskConfig
from moe_trm.config.task_rules import best_metric
from moe_trm.learner.protocol import Learner

log = logging.getLogger(__name__)


class Best:
    """Keeps `folder/best` at the weights with the highest `eval.best_metric` so far; nothing without `eval.keep_best`.

    Every rank makes one, and all are offered the same evaluations. All ranks must see the folder.
    """

    def __init__(self, evaluation: EvalConfig, task: TaskConfig, rollout: RolloutConfig, folder: Path) -> None:
        self._keeps, self._metric, self._path = (
            evaluation.keep_best,
            best_metric(evaluation, task, rollout),
            folder / "best",
        )
        self._value: float | None = None

    def state(self) -> float | None:
        """The best value so far, for a checkpoint."""
        return self._value

    def restore(self, state: float | None) -> None:
        """Go on after `state`. Runs of before kept a first evaluation that was not a number."""
        self._value = state if state is not None and math.isfinite(state) else None

    def offer(self, step: int, evaluation: Mapping[str, float], learner: Learner) -> None:
        """Take note of an evaluation, and write the weights when it is the best; those of step 0 are the start
        checkpoint's. Collective.
        """
        if not self._keeps or not evaluation:
            return
        value = evaluation.get(self._metric)
        if value is not None and not math.isfinite(value):
            return  # nothing could be compared with it
        if value is None:
            if dist.get_rank() == 0:
                log.warning(
                    "eval.best_metric=%s is not among what was measured: %s",
                    self._metric,
                    sorted(evaluation),
                )
            return
        improved = self._value is None or value > self._value
        if improved:
            self._value = value
        if improved and step:
            self._write(learner)

    def _write(self, learner: Learner) -> None:
        partial, old = self._path.with_name("best.partial"), self._path.with_name("best.old")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        learner.export_checkpoint(str(partial))
        if dist.get_rank() == 0:
            shutil.rmtree(old, ignore_errors=True)
            if self._path.exists():
                self._path.rename(old)
            partial.rename(self._path)
            shutil.rmtree(old, ignore_errors=True)
