"""Evaluation on held-out prompts: one greedy answer each, and several sampled ones where asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_trm.config.schema import EvalConfig
from moe_trm.errors import RecordRejected
from moe_trm.rollout.sample_metrics import part_means
from moe_trm.rollout.sampler import Sampler
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

Answer = RolloutRecord | str
"""A rewarded answer, or why there is none."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetAnswers:
    """Answers to the prompts of one set, in their order: a greedy one each, and `samples[k]`, the k-th sampled ones."""

    prompts: tuple[Prompt, ...]
    greedy: Sequence[Answer]
    samples: Sequence[Sequence[Answer]]


class Evaluator:
    """Measures the weights that the engine has now. It draws no training prompt, and nothing reaches ledger or store.

    Args:
        settings: measurements in addition to the greedy answers.
        sets: held-out prompts by the name of their set, `""` for the main one.
        params: of the behaviour policy. Its stop tokens hold here too, as does its length without a
            `settings.max_new_tokens`.
        greedy_metric: name of the mean reward of greedy answers (`config.task_rules.greedy_metric`).
        concurrency: answers that are made at the same time. The time limits of an answer begin with its turn.
    """

    def __init__(
        self,
        settings: EvalConfig,
        sampler: Sampler,
        sets: Mapping[str, Sequence[Prompt]],
        params: SamplingParams,
        *,
        greedy_metric: str,
        concurrency: int,
    ) -> None:
        self._slots = asyncio.Semaphore(concurrency)
        self._sampler, self._sets, self._num_samples = sampler, sets, settings.samples
        self._greedy_metric = greedy_metric
        bounded = replace(params, max_new_tokens=settings.max_new_tokens or params.max_new_tokens, min_p=0.0)
        self._greedy = replace(bounded, temperature=1.0, top_p=1.0, top_k=1)
        self._sampled = replace(bounded, temperature=settings.temperature, top_p=settings.top_p)

    async def measure(self) -> dict[str, float]:
        """Metrics of every set, as `eval/<metric>` and `eval/<set>/<metric>`.

        | metric | meaning |
        |---|---|
        | `accuracy`, or `reward` | mean reward of the greedy answers; `accuracy` only of rewards that are all 0 or 1 |
        | `accuracy_se`, or `reward_se` | its standard error over prompts |
        | `reward/<name>` | mean of that part of their reward |
        | `length_mean`, `finished_fraction` | of the greedy answers: sampled tokens; share of finished ones |
        | `avg_at_<k>` | mean reward of k sampled answers to each prompt |
        | `pass_at_<k>` | share of prompts solved at least once in k; of rewards that are all 0 or 1 |
        | `best_at_<k>` | mean of the best of k, of rewards that need not be 0 or 1 |
        | `prompts` | held-out prompts |
        | `rejected/<reason>` | answers without a reward |
        | `answered_fraction` | share of the prompts whose greedy answer has a reward, where some have none |

        Where the reward says right or wrong (`accuracy`), an answer without one is wrong: in the accuracy, and in
        `avg_at_<k>` and `pass_at_<k>`. Other rewards have no value that would mean this. Their means leave it out.
        """
        metrics: dict[str, float] = {}
        for name, prompts in self._sets.items():
            metrics |= self.summary(name, await self.answers(prompts))
        return metrics

    async def answers(self, prompts: Sequence[Prompt]) -> SetAnswers:
        """The greedy answer to each prompt, and the sampled ones."""
        greedy, *samples = await asyncio.gather(
            self._answers(prompts, self._greedy),
            *(self._answers(prompts, self._sampled) for _ in range(self._num_samples)),
        )
        return SetAnswers(tuple(prompts), greedy, samples)

    def summary(self, name: str, answers: SetAnswers) -> dict[str, float]:
        """The metrics of the set `name`; see `measure`."""
        metrics = {"prompts": float(len(answers.prompts))}
        records = [answer for answer in answers.greedy if isinstance(answer, RolloutRecord)]
        name_of_mean, rewards = self.greedy_rewards(answers)
        if rewards:
            metrics[name_of_mean] = float(np.mean(rewards))
        if len(rewards) > 1:
            metrics[f"{name_of_mean}_se"] = standard_error(rewards)
        if records:
            metrics |= {
                **{f"reward/{name}": mean for name, mean in part_means(records).items()},
                "length_mean": float(np.mean([record.num_sampled for record in records])),
                "finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
            }
        if len(records) < len(answers.greedy):
            metrics["answered_fraction"] = len(records) / len(answers.greedy)
            counted = "count as wrong" if name_of_mean == "accuracy" else "are left out of the figures"
            details = (len(answers.greedy) - len(records), len(answers.greedy), f" of {name}" if name else "", counted)
            log.warning("%d of %d greedy answers%s have no reward and %s", *details)
        of_prompt = self._counted(list(zip(*answers.samples, strict=True)))
        scored = [rewards for rewards in of_prompt if rewards]
        if scored:
            metrics[f"avg_at_{self._num_samples}"] = float(np.mean([np.mean(rewards) for rewards in scored]))
            is_share = all(map(_right_or_wrong, scored))
            names = (["pass"] if is_share else []) + (
                [] if is_share and self._greedy_metric == "accuracy" else ["best"]
            )
            best = float(np.mean([max(rewards) for rewards in scored]))
            metrics |= {f"{name}_at_{self._num_samples}": best for name in names}
        answer_sets = (answers.greedy, *answers.samples)
        reasons = Counter(answer for answer_set in answer_sets for answer in answer_set if isinstance(answer, str))
        metrics |= {f"rejected/{reason}": float(number) for reason, number in sorted(reasons.items())}
        prefix = f"eval/{name}/" if name else "eval/"
        return {f"{prefix}{key}": value for key, value in metrics.items()}

    def greedy_rewards(self, answers: SetAnswers) -> tuple[str, Sequence[float]]:
        """`accuracy`, where that is the greedy metric and holds of these answers, or `reward`; and the values of its
        mean.
        """
        [rewards] = self._counted([answers.greedy])
        return self._greedy_metric if _right_or_wrong(rewards) else "reward", rewards

    def _counted(self, answer_sets: Sequence[Sequence[Answer]]) -> list[list[float]]:
        """The rewards of each of these lots of answers. One without is wrong where all others say right or wrong."""
        reward_lists = [
            [reward_of(answer) for answer in lot if isinstance(answer, RolloutRecord)] for lot in answer_sets
        ]
        if self._greedy_metric != "accuracy" or not all(map(_right_or_wrong, reward_lists)):
            return reward_lists
        return [
            rewards + [0.0] * (len(lot) - len(rewards)) for rewards, lot in zip(reward_lists, answer_sets, strict=True)
        ]

    async def _answers(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
        return list(await asyncio.gather(*(self._answer(prompt, params) for prompt in prompts)))

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        try:
            async with self._slots:
                return await self._sampler.answer(prompt, params)
        except RecordRejected as rejection:
            return rejection.reason


def standard_error(rewards: Sequence[float]) -> float:
    """Of the mean of two or more rewards. Of a share with two right and two wrong ones more (Agresti and Coull): a few
    prompts that are all right prove no certainty.
    """
    if not _right_or_wrong(rewards):
        return float(np.std(rewards, ddof=1) / np.sqrt(len(rewards)))
    number = len(rewards) + 4
    share = (sum(rewards) + 2) / number
    return float(np.sqrt(share * (1 - share) / number))


def _right_or_wrong(rewards: Sequence[float]) -> bool:
    """True where a mean of these rewards is a share."""
    return set(rewards) <= {0.0, 1.0}


def reward_of(record: RolloutRecord) -> float:
    """The reward that its sampler gave the record."""
    assert record.reward is not None, "the sampler gives rewards"
    return record.reward
