"""The scores of a run's updates on their way into a recording (`moe_trm.recording.scores`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.methods.row_fields import shared
from moe_trm.recording.scores import CONFIG_FILE, SCORES_FILE, ScoredBatch, ScoredUpdate, write_scores
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import TokenBatch

Objective = Callable[[int, Scores], Tensor]


class ScoreRecorder:
    """Listens to the updates of a run and writes what they saw, step by step, with the configuration beside it.

    `record.bundle` is the folder; without one nothing is recorded. `data_rank` of `data_size` ranks that hold different
    rows; `is_data_leader`: this rank writes for those that hold the same rows.
    """

    def __init__(self, config: Config, data_rank: int, data_size: int, *, is_data_leader: bool = True) -> None:
        # The format has log-probs of the sampled weights and of the start of the step, none of an averaged policy.
        is_recorded = config.record.bundle and is_data_leader and config.pipeline.scores_fit
        self._folder = Path(config.record.bundle) if is_recorded and config.record.bundle else None
        self._rank, self._size = data_rank, data_size
        self._updates: list[tuple[AnchoredMinibatch, dict[int, Scores]]] = []
        self._has_header = False
        if self._folder and data_rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / CONFIG_FILE).write_text(json.dumps(config.dump(), indent=2) + "\n", encoding="utf-8")

    def watch(self, part: AnchoredMinibatch, objective: Objective) -> Objective:
        """`objective`, whose calls are remembered as the next update of this step."""
        if self._folder is None:
            return objective
        seen: dict[int, Scores] = {}
        self._updates.append((part, seen))

        def watched(index: int, current: Scores) -> Tensor:
            # Detached: the graph of a whole step must not stay in memory.
            tensors = shared(Scores, current)
            seen[index] = Scores(current.logprobs.detach(), **{name: value.detach() for name, value in tensors.items()})
            return objective(index, current)

        return watched

    def write(self, step: int) -> None:
        """Write what the updates since the last call saw.

        The first call removes what an earlier run left of later steps.
        """
        updates, self._updates = self._updates, []
        if self._folder is None:
            return
        if not self._has_header:
            self._remove_leftovers(step)
            self._has_header = True
        self._folder.mkdir(parents=True, exist_ok=True)
        scored = [_scored(part, seen) for part, seen in updates]
        write_scores(self._folder, step, scored, data_rank=self._rank, data_size=self._size)

    def _remove_leftovers(self, step: int) -> None:
        """Later steps of this rank, and ranks that this run does not have: they would pass for steps of this run."""
        assert self._folder is not None
        for path in self._folder.glob("scores-*.safetensors"):
            name = SCORES_FILE.fullmatch(path.name)
            if name and (
                (int(name[2]) == self._rank and int(name[1]) > step) or (self._rank == 0 and int(name[2]) >= self._size)
            ):
                path.unlink(missing_ok=True)


def _sample_tokens(batch: TokenBatch) -> Tensor:
    """`[B]` scored tokens of the sample of each row."""
    return batch.mask.sum(dim=1) if batch.sample_tokens is None else batch.sample_tokens


def _scored(part: AnchoredMinibatch, seen: dict[int, Scores]) -> ScoredUpdate:
    batches = []
    several = any(batch.sample_tokens is not None for batch in part.batches)
    for index, (micro, batch) in enumerate(zip(part.mini.micro_batches, part.batches, strict=True)):
        current, ids = seen[index], [row.record.row_id for row in micro.rows]
        anchor = part.scores[index] if part.scores else None
        batches.append(
            ScoredBatch(
                mask=batch.mask,
                rollout_logprobs=batch.rollout_logprobs,
                current_logprobs=current.logprobs,
                advantages=batch.advantages,
                sample_ids=torch.tensor(ids or [-1], dtype=torch.int64),
                anchor_logprobs=None if anchor is None else anchor.logprobs,
                behavior_logprobs=None if part.behavior is None else part.behavior[index],
                anchor_exact_kl=None if anchor is None else anchor.exact_kl,
                sample_tokens=_sample_tokens(batch) if several else None,
                **shared(ScoredBatch, batch, current),
            )
        )
    mini = part.mini
    return ScoredUpdate(tuple(batches), mini.num_sequences, mini.num_tokens, part.recovery, part.version, part.kl_coef)
