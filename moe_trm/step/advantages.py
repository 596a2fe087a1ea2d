"""Advantages of a step, of every estimator and in one place: once its anchors and the KL to the reference are known.

The controller hands every rank the rewards and prompts of all samples (`TrainBatch.compared`), in one order. So all
ranks compute the same values, and each takes those of its own rows. Only numbers of tokens that an estimator reads are
gathered: the KL in the reward, ratios to the rollout, and the energies of scores.

Shape letters: N samples of the step on all ranks, S scored tokens of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from moe_trm.advantages.by_name import GDPO, advantages_by_part, outcome_advantages
from moe_trm.advantages.by_row import Array, Groups, opob
from moe_trm.advantages.by_token import otb, score_energy, turn_grpo, weighted_energy
from moe_trm.advantages.zero_variance import entropy_shaped, support_entropy
from moe_trm.batch.filters import is_overlong
from moe_trm.config.schema import AdvantageConfig, BatchConfig
from moe_trm.learner.protocol import Learner
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.step.passes import AnchoredMinibatch, log_sequence_ratios, log_token_ratios
from moe_trm.types import RewardedSample, RolloutRecord, TokenBatch

OfRow = Callable[[RolloutRecord], Array]
"""The advantages of the scored tokens of a row, `[S]`."""


class Advantages:
    """The estimator of `advantage.name`, with what changes its values: `batch.overlong`, and the weights of named
    rewards (a name without one has weight 1).
    """

    def __init__(self, settings: AdvantageConfig, batch: BatchConfig, reward_weights: Mapping[str, float]) -> None:
        self._settings, self._weights = settings, reward_weights
        self._entry = ADVANTAGES[settings.name]
        self._lone = settings.lone_sample or self._entry.lone or "zero"
        self._masks_overlong = batch.overlong == "mask"

    def add_advantages(
        self,
        learner: Learner,
        parts: Sequence[AnchoredMinibatch],
        compared: Sequence[Sequence[RewardedSample]],
        penalties: Sequence[float] | None = None,
    ) -> list[AnchoredMinibatch]:
        """The minibatches `parts` of this rank with their advantages. Collective.

        `compared`: `TrainBatch.compared` of their step. `penalties`: what the reward of each of this rank's rows is
        lowered by, in the order of its micro-batches.
        """
        values, means = iter(self.of_rows(learner, parts, compared, penalties)), group_means(compared)
        return [
            replace(
                part,
                batches=[
                    placed(
                        batch, [next(values) for _ in micro.rows], [means[row.record.group_id] for row in micro.rows]
                    )
                    for batch, micro in zip(part.batches, part.mini.micro_batches, strict=True)
                ],
            )
            for part in parts
        ]

    def of_rows(
        self,
        learner: Learner,
        parts: Sequence[AnchoredMinibatch],
        compared: Sequence[Sequence[RewardedSample]],
        penalties: Sequence[float] | None = None,
    ) -> list[Array]:
        """`[S]` float64 advantages of the scored tokens of each of this rank's rows, as `add_advantages` adds them."""
        records = own_records(parts)
        gathered = _Gathered(learner, records)
        estimate = self._estimator(gathered, parts, penalties)
        of_sample: dict[int, OfRow] = {}
        for samples in compared:
            of_row = self._shaped(samples, estimate(samples))
            of_sample |= dict.fromkeys((sample.sample_id for sample in samples), of_row)
        return [
            np.zeros(record.num_scored)
            if self._masks_overlong and is_overlong(record)
            else of_sample[record.sample_id](record)
            for record in records
        ]

    def _estimator(
        self, gathered: _Gathered, parts: Sequence[AnchoredMinibatch], penalties: Sequence[float] | None
    ) -> Callable[[Sequence[RewardedSample]], OfRow]:
        """The estimator, which compares samples; what it reads of tokens is gathered here."""
        if self._entry.level == "turn":
            return self._by_turn
        if self._entry.level == "token":
            ratios = [row_ratios.cpu().numpy() for row_ratios in log_token_ratios(parts)]
            energies = gathered.arrays([weighted_energy(*pair) for pair in zip(gathered.records, ratios, strict=True)])
            return lambda samples: self._by_token(samples, energies)
        penalty_of_sample = None if penalties is None else gathered.sums(penalties)
        if not self._entry.reads_ratios:
            return lambda samples: _constant(samples, self._by_sample(samples, _rewards(samples, penalty_of_sample)))
        log_weights = gathered.sums(log_sequence_ratios(parts))
        sums = gathered.sums([float(score_energy(record).sum()) for record in gathered.records])
        return lambda samples: _constant(
            samples,
            opob(
                _rewards(samples, penalty_of_sample),
                _groups(samples),
                _column(samples, log_weights),
                _column(samples, sums),
                lone=self._lone,
            ),
        )

    def _by_sample(self, samples: Sequence[RewardedSample], rewards: Array) -> Array:
        settings, num_tokens = self._settings, np.array([sample.num_tokens for sample in samples])
        if settings.name == GDPO:
            parts = [sample.reward_parts for sample in samples]
            return advantages_by_part(parts, _groups(samples), self._weights, num_tokens, lone=self._lone)
        return outcome_advantages(
            settings.name,
            rewards,
            _groups(samples),
            num_tokens,
            normalize_std=settings.normalize_std,
            lone=self._lone,
            baselines=np.array([sample.baseline for sample in samples], np.float64)
            if self._entry.reads_greedy
            else None,
        )

    def _by_turn(self, samples: Sequence[RewardedSample]) -> OfRow:
        values = turn_grpo(
            _rewards(samples),
            _groups(samples),
            [np.array(sample.turns, np.int64) for sample in samples],
            discount=self._settings.turn_discount,
            normalize_std=self._settings.normalize_std,
            lone=self._lone,
        )
        by_sample = {
            sample.sample_id: dict(zip(sample.turns, of_turn.tolist(), strict=True))
            for sample, of_turn in zip(samples, values, strict=True)
        }

        def of_row(record: RolloutRecord) -> Array:
            turns, of_turn = record.turn_ids[record.sampled][record.scored], by_sample[record.sample_id]
            return np.array([of_turn[turn] for turn in turns.tolist()], np.float64)

        return of_row

    def _by_token(self, samples: Sequence[RewardedSample], energies: dict[int, Array]) -> OfRow:
        sample_energies = [energies[sample.sample_id] for sample in samples]
        values = otb(_rewards(samples), _groups(samples), sample_energies, lone=self._lone)
        of_sample = {sample.sample_id: advantage for sample, advantage in zip(samples, values, strict=True)}
        return lambda record: of_sample[record.sample_id]

    def _shaped(self, samples: Sequence[RewardedSample], of_row: OfRow) -> OfRow:
        """`of_row`, but by the entropy of each token in groups of several samples and one reward."""
        scale = self._settings.zero_variance_scale
        if not scale:
            return of_row
        rewards, groups = _rewards(samples), Groups(_groups(samples))
        is_uniform = (groups.spread(rewards) == 0) & (groups.size > 1)
        right = {
            sample.sample_id: sample.reward > 0
            for sample, is_chosen in zip(samples, is_uniform, strict=True)
            if is_chosen
        }

        def shaped(record: RolloutRecord) -> Array:
            if record.sample_id not in right:
                return of_row(record)
            return entropy_shaped(support_entropy(record), right=right[record.sample_id], scale=scale)

        return shaped


def placed(batch: TokenBatch, of_rows: Sequence[Array], means: Sequence[float]) -> TokenBatch:
    """`batch` with the advantages `[S]` of the scored tokens of its rows, and the mean rewards of their groups."""
    values = torch.from_numpy(np.concatenate([np.zeros(0), *of_rows]).astype(np.float32)).to(batch.mask.device)
    padding = [0.0] * (batch.mask.shape[0] - len(means))
    return replace(
        batch,
        advantages=torch.zeros_like(batch.advantages).masked_scatter(batch.mask, values),
        group_means=torch.tensor([*means, *padding], dtype=torch.float32, device=batch.mask.device),
    )


def group_means(compared: Sequence[Sequence[RewardedSample]]) -> dict[int, float]:
    """Mean reward of each group; of one whose rewards are equal, that reward to the last bit."""
    means: dict[int, float] = {}
    for samples in filter(None, compared):
        rewards, groups = _rewards(samples), Groups(_groups(samples))
        of_samples = np.where(groups.spread(rewards) == 0, rewards, groups.mean(rewards))
        means |= dict(zip(_groups(samples).tolist(), of_samples.tolist(), strict=True))
    return means


def own_records(parts: Sequence[AnchoredMinibatch]) -> list[RolloutRecord]:
    """This rank's records of the step, in the order of its micro-batches."""
    return [row.record for part in parts for micro in part.mini.micro_batches for row in micro.rows]


class _Gathered:
    """Numbers of the rows of all ranks, by sample. Collective, as its methods; `records` are this rank's."""

    def __init__(self, learner: Learner, records: Sequence[RolloutRecord]) -> None:
        self._learner, self.records = learner, records

    def sums(self, of_rows: Sequence[float]) -> dict[int, float]:
        """One number of each row, summed over the rows of a sample."""
        totals: dict[int, float] = {}
        for number, value in zip(self._samples(), self._everyone(of_rows), strict=True):
            totals[number] = totals.get(number, 0.0) + value
        return totals

    def arrays(self, of_rows: Sequence[Array]) -> dict[int, Array]:
        """An array of each row, where every sample is one row."""
        numbers = [*self._samples()]
        lengths = np.array([*self._everyone([len(row_values) for row_values in of_rows])], np.int64)
        values = np.array([*self._everyone(np.concatenate([np.zeros(0), *of_rows]))])
        assert len({*numbers}) == len(numbers), "a sample is one row under estimators by token"
        return dict(zip(numbers, np.split(values, lengths.cumsum()[:-1]), strict=True)) if numbers else {}

    def _samples(self) -> Iterator[int]:
        return map(int, self._everyone([record.sample_id for record in self.records]))

    def _everyone(self, values: Sequence[float] | Array) -> Iterator[float]:
        gathered = self._learner.gather(torch.as_tensor(np.asarray(values, np.float64)))
        return iter(gathered.tolist())


def _constant(samples: Sequence[RewardedSample], values: Array) -> OfRow:
    of_sample = {sample.sample_id: value for sample, value in zip(samples, values.tolist(), strict=True)}
    return lambda record: np.full(record.num_scored, of_sample[record.sample_id])


def _rewards(samples: Sequence[RewardedSample], penalty_of_sample: dict[int, float] | None = None) -> Array:
    rewards = np.array([sample.reward for sample in samples], np.float64)
    return rewards if penalty_of_sample is None else rewards - _column(samples, penalty_of_sample)


def _groups(samples: Sequence[RewardedSample]) -> Array:
    return np.array([sample.group_id for sample in samples])


def _column(samples: Sequence[RewardedSample], of_sample: dict[int, float]) -> Array:
    return np.array([of_sample[sample.sample_id] for sample in samples])
