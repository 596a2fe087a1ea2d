"""The samples of a step as advantages compare them: a few numbers each, which every rank is given of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_trm.advantages.by_name import GDPO
from moe_trm.batch.train_rows import num_sampled
from moe_trm.errors import ControllerError
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.types import RewardedSample, RolloutRecord


def rewarded_samples(name: str, samples: Sequence[RolloutRecord]) -> tuple[RewardedSample, ...]:
    """The fields of accepted samples that the advantage estimator `name` compares, in their order.

    Raises:
        ControllerError: a sample lacks what the estimator reads.
    """
    entry = ADVANTAGES[name]
    if entry.reads_greedy:
        _check_baselines(samples)
    if name == GDPO:
        _check_parts(samples)
    return tuple(
        RewardedSample(
            sample.sample_id,
            sample.group_id,
            num_sampled(sample),
            _reward(sample),
            sample.reward_parts,
            sample.baseline,
            _turns(sample) if entry.level == "turn" else (),
        )
        for sample in samples
    )


def _turns(sample: RolloutRecord) -> tuple[int, ...]:
    turns = np.unique(np.concatenate([row.turn_ids[row.sampled][row.scored] for row in sample.rows]))
    return tuple(turns.tolist())


def _reward(sample: RolloutRecord) -> float:
    if sample.reward is None:
        raise ControllerError(
            "a sample on its way to the learner has no reward",
            where=f"sample {sample.sample_id}",
            got=None,
            expected="a number in every record",
            fix="samplers of your own set RolloutRecord.reward, or raise RecordRejected",
        )
    return sample.reward


def _check_baselines(samples: Sequence[RolloutRecord]) -> None:
    missing = sum(sample.baseline is None for sample in samples)
    if missing:
        raise ControllerError(
            "remax compares each sample with the greedy answer to its prompt",
            where="advantage.name=remax",
            got=f"{missing} of {len(samples)} samples without one",
            expected="the reward of a greedy answer in every record",
            fix="samplers of your own set RolloutRecord.baseline, or choose another advantage.name",
        )


def _check_parts(samples: Sequence[RolloutRecord]) -> None:
    names = sorted(samples[0].reward_parts)
    for sample in samples:
        if not sample.reward_parts or sorted(sample.reward_parts) != names:
            raise ControllerError(
                "gdpo compares the same named rewards of every sample",
                where="advantage.name=gdpo",
                got=sorted(sample.reward_parts) or "a reward that is one number",
                expected=names or "a reward function that returns a dict of named numbers",
                fix="return every name from the reward function, 0 where it does not apply, or choose grpo",
            )
