"""From a sample to a number.

A reward that fails, or is no finite number, rejects its sample instead of becoming one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from moe_trm.errors import RecordRejected
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord

if TYPE_CHECKING:
    from moe_trm.tasks.protocol import Task


@dataclass(frozen=True)
class Reward:
    """A sample's reward, and its parts by name when it is a weighted sum."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


def exact(text: str, answer: str) -> float:
    """1 when the text after the last `#`, without surrounding blanks, is the answer; else 0, also without any `#`."""
    _, mark, tail = text.rpartition("#")
    return float(bool(mark) and tail.strip() == answer.strip())


def exact_reward(sample: RewardInput) -> float:
    """`exact` of the last answer; 0 when the policy did not come to an end by itself."""
    return exact(sample.completion, sample.answer) if sample.finished else 0.0


async def score(task: Task, prompt: Prompt, record: RolloutRecord) -> Reward:
    """The task's reward of a record.

    Raises:
        RecordRejected: `reward_error` (the reward function raised), `reward_timeout`, `reward_crash` (it ended its
            process), `reward_type` (no number), `reward_shape` (not one for each sample), `reward_nan` (not finite).
    """
    sample = reward_input(task, prompt, record)
    return read_reward(await task.reward(sample), task.reward_weights, prompt.prompt_id)


def reward_input(task: Task, prompt: Prompt, record: RolloutRecord) -> RewardInput:
    """Input of the reward function."""
    completion_ids = _completion_ids(task.tokens, record)
    completion, transcript = _written(task.tokens, len(prompt.token_ids), record, completion_ids)
    finished = record.finish_reason == "stop"
    return RewardInput(
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        answer=prompt.answer,
        completion=completion,
        completion_ids=tuple(completion_ids),
        transcript=transcript,
        num_turns=int(record.turn_ids[record.sampled].max(initial=0)) + 1,
        finish_reason="stop" if finished else "length",
        extra=prompt.extra,
    )


def _written(
    tokens: Tokens, prompt_length: int, record: RolloutRecord, completion_ids: Sequence[int]
) -> tuple[str, str]:
    completion, transcript_ids = tokens.decode(completion_ids), record.tokens[prompt_length:].tolist()
    return completion, completion if transcript_ids == completion_ids else tokens.decode(transcript_ids)


def _completion_ids(tokens: Tokens, record: RolloutRecord) -> list[int]:
    """The ids of the last answer, without its end token."""
    turns = record.turn_ids[record.sampled].tolist()
    sampled: list[int] = record.tokens[record.sampled].tolist()
    completion = sampled[turns.index(turns[-1]) :] if turns else sampled
    if record.finish_reason == "stop" and completion and completion[-1] in tokens.stop_token_ids:
        completion.pop()
    return completion


def read_reward(
    value: object, weights: Mapping[str, float], where: str, prefix: str = "reward", place: str = "the function"
) -> Reward:
    """A number, or a dict of named numbers, whose weighted sum counts (a name without a weight has weight 1).

    `place` is where the function is defined. Raises `RecordRejected` (`<prefix>_type`, `<prefix>_nan`).
    """
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) for name in value):
            raise _not_a_number(value, where, prefix, place)
        parts = {name: _number(part, f"{where}, {name}", prefix, place) for name, part in value.items()}
        return Reward(math.fsum(weights.get(name, 1.0) * part for name, part in parts.items()), parts)
    return Reward(_number(value, where, prefix, place))


def _number(value: object, where: str, prefix: str, place: str) -> float:
    if not isinstance(value, Real):
        raise _not_a_number(value, where, prefix, place)
    if not math.isfinite(float(value)):
        raise RecordRejected(
            f"{prefix}_nan", "the reward is not finite", where=where, got=value, expected="a finite float"
        )
    return float(value)


def _not_a_number(value: object, where: str, prefix: str, place: str) -> RecordRejected:
    return RecordRejected(
        f"{prefix}_type",
        f"your {prefix} function returned {type(value).__name__}",
        where=where,
        got=repr(value),
        expected="a float, or a dict of named floats",
        fix=f"return a number on every path of {place}",
    )
