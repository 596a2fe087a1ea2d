"""Evaluation on held-out prompts: one greedy answer each, and several sampled ones where asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moe_trm.config.schema import EvalConfig
from moe_trm.errors import RecordRejected
from moe_trm.rollout.sampler import Sampler
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

Answer = RolloutRecord | str
"""A rewarded answer, or why there is none."""


class Evaluator:
    """Measures the weights that the engine has now.

    It draws no training prompt, and nothing of it reaches ledger or store.

    Args:
        settings: measurements in addition to the greedy answers.
        sampler: makes the answers.
        sets: held-out prompts by the name of their set, `""` for the main one.
        params: of the behaviour policy; its stop tokens and, without `settings.max_new_tokens`, its length hold for
            evaluation too.
    """

    def __init__(
        self, settings: EvalConfig, sampler: Sampler, sets: Mapping[str, Sequence[Prompt]], params: SamplingParams
    ) -> None:
        self._sampler, self._sets, self._num_samples = sampler, sets, settings.samples
        bounded = replace(params, max_new_tokens=settings.max_new_tokens or params.max_new_tokens, min_p=0.0)
        self._greedy = replace(bounded, temperature=1.0, top_p=1.0, top_k=1)
        self._sampled = replace(bounded, temperature=settings.temperature, top_p=settings.top_p)

    async def measure(self) -> dict[str, float]:
        """Metrics of every set, as `eval/<metric>` and `eval/<set>/<metric>`.

        | metric | meaning |
        |---|---|
        | `accuracy` | mean reward of the greedy answers |
        | `length_mean`, `finished_fraction` | of the greedy answers: sampled tokens; share of finished ones |
        | `avg_at_<k>` | mean reward of k sampled answers to each prompt |
        | `pass_at_<k>` | mean of the best of k; for rewards of 0 and 1 the share of prompts solved at least once |
        | `prompts` | held-out prompts |
        | `rejected/<reason>` | answers without a reward, which are left out |
        """
        metrics: dict[str, float] = {}
        for name, prompts in self._sets.items():
            prefix = f"eval/{name}/" if name else "eval/"
            metrics |= {f"{prefix}{key}": value for key, value in (await self._measure(prompts)).items()}
        return metrics

    async def _measure(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        greedy, *samples = await asyncio.gather(
            self._answers(prompts, self._greedy),
            *(self._answers(prompts, self._sampled) for _ in range(self._num_samples)),
        )
        metrics = {"prompts": float(len(prompts))}
        records = [answer for answer in greedy if isinstance(answer, RolloutRecord)]
        if records:
            metrics |= {
                "accuracy": float(np.mean([_reward(record) for record in records])),
                "length_mean": float(np.mean([record.num_sampled for record in records])),
                "finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
            }
        of_prompt = [
            [_reward(answer) for answer in answers if isinstance(answer, RolloutRecord)]
            for answers in zip(*samples, strict=True)
        ]
        scored = [rewards for rewards in of_prompt if rewards]
        if scored:
            metrics[f"avg_at_{self._num_samples}"] = float(np.mean([np.mean(rewards) for rewards in scored]))
            metrics[f"pass_at_{self._num_samples}"] = float(np.mean([max(rewards) for rewards in scored]))
        reasons = Counter(answer for answers in (greedy, *samples) for answer in answers if isinstance(answer, str))
        return metrics | {f"rejected/{reason}": float(number) for reason, number in sorted(reasons.items())}

    async def _answers(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
        return list(await asyncio.gather(*(self._answer(prompt, params) for prompt in prompts)))

    async def _answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        try:
            return await self._sampler.answer(prompt, params)
        except RecordRejected as rejection:
            return rejection.reason


def _reward(record: RolloutRecord) -> float:
    assert record.reward is not None, "the sampler gives rewards"
    return record.reward
