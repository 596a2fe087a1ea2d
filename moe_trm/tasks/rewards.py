"""From an answer to a number. A reward that fails, or is no finite number, rejects its record instead of becoming one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from moe_trm.errors import MoeTrmError, RecordRejected
from moe_trm.types import Prompt, RolloutRecord

if TYPE_CHECKING:
    from moe_trm.tasks.protocol import Task


def exact(text: str, answer: str) -> float:
    """1 when the text after the last `#`, without surrounding blanks, is the answer; else 0, also without any `#`."""
    _, mark, tail = text.rpartition("#")
    return float(bool(mark) and tail.strip() == answer.strip())


def score(task: Task, prompt: Prompt, record: RolloutRecord) -> float:
    """The reward of a record: of its sampled tokens without the stop token; an answer that did not stop by itself is worth 0.

    Raises:
        RecordRejected: `reward_error` (the reward function raised), `reward_type` (no number), `reward_nan` (not finite).
    """
    if record.finish_reason != "stop":
        return 0.0
    answer = [int(token) for token in record.tokens[record.sampled]]
    if answer and answer[-1] in task.tokens.stop_token_ids:
        answer.pop()
    return guarded(task.reward, prompt, answer)


def score_answer(task: Task, prompt: Prompt, token_ids: Sequence[int], *, finished: bool) -> float:
    """As `score`, for an evaluation's answer, which comes without its stop token."""
    return guarded(task.reward, prompt, token_ids) if finished else 0.0


def guarded(reward: Callable[[Prompt, Sequence[int]], float], prompt: Prompt, token_ids: Sequence[int]) -> float:
    """Call a reward function that may be a user's. Raises `RecordRejected` as `score` does."""
    where = f"prompt {prompt.prompt_id}"
    try:
        value: object = reward(prompt, token_ids)
    except RecordRejected:
        raise
    except (
        MoeTrmError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise RecordRejected(
            "reward_error",
            "the reward function raised",
            where=where,
            got=f"{type(error).__name__}: {error}",
            expected="a number",
            fix="make the reward function total",
        ) from error
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, Real):
        raise RecordRejected(
            "reward_type",
            "the reward is not a number",
            where=where,
            got=f"{value!r} ({type(value).__name__})",
            expected="a float",
        )
    if not math.isfinite(float(value)):
        raise RecordRejected(
            "reward_nan", "the reward is not finite", where=where, got=value, expected="a finite float"
        )
    return float(value)
