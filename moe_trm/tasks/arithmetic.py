"""The arithmetic task: problems are drawn, not read, and the model may show its working before the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping

from moe_trm.errors import ConfigError
from moe_trm.tasks.problems import ArithmeticProblem, draw
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.scorer import Scorer
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt


class ArithmeticTask:
    """See `moe_trm.tasks.protocol.Task`."""

    def __init__(
        self,
        tokens: Tokens,
        scorer: Scorer,
        *,
        seed: int,
        max_digits: int,
        eval_size: int,
        reward_weights: Mapping[str, float],
    ) -> None:
        self.tokens, self.reward_weights, self._scorer = tokens, reward_weights, scorer
        self._seed, self._max_digits = seed, max_digits
        held_out = tuple(self._prompt(problem) for problem in held_out_problems(max_digits, eval_size))
        self._eval = {"": held_out} if held_out else {}

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        rng = random.Random(f"arithmetic-{self._seed}-{step}")
        return [self._prompt(draw(rng, self._max_digits, held_out=False)) for _ in range(count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return self._eval

    async def start(self) -> None:
        await self._scorer.start()

    async def reward(self, sample: RewardInput) -> object:
        return await self._scorer(sample)

    async def close(self) -> None:
        await self._scorer.close()

    def _prompt(self, problem: ArithmeticProblem) -> Prompt:
        token_ids = self.tokens.encode(problem.prompt)
        return Prompt(problem.name, token_ids, text=problem.prompt, answer=problem.answer)


def held_out_problems(max_digits: int, count: int) -> list[ArithmeticProblem]:
    """`count` distinct held-out problems, the same for every seed.

    Raises `ConfigError` when there are not that many.
    """
    rng = random.Random(f"held-out-{max_digits}")
    by_name: dict[str, ArithmeticProblem] = {}
    for _ in range(200 * count):
        problem = draw(rng, max_digits, held_out=True)
        by_name.setdefault(problem.name, problem)
        if len(by_name) == count:
            break
    if len(by_name) < count:
        raise ConfigError(
            "too few held-out problems of this size",
            where="task.eval_size",
            got=f"{count} asked, {len(by_name)} with at most {max_digits} digits",
            expected=f"at most {len(by_name)}",
            fix="lower task.eval_size or raise task.max_digits",
        )
    return list(by_name.values())
