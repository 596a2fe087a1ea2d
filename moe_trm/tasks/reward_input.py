"""Input of a reward function for one sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RewardInput:
    """One finished sample.

    Attributes:
        prompt_id: file and line of the prompt, or its name.
        prompt: the prompt's text, after template and chat template.
        answer: the expected answer, as in the prompt file; empty where it has none.
        completion: what the policy wrote in its last answer, special tokens left out.
        completion_ids: the same as ids, as they were sampled, without the end token.
        transcript: everything after the prompt: all answers, and the text of tools or users between them.
        num_turns: answers; 1 without a rollout function.
        finish_reason: `stop`, or `length` when a limit cut it.
        extra: the other fields of the prompt's row.
    """

    prompt_id: str
    prompt: str
    answer: str
    completion: str
    completion_ids: tuple[int, ...]
    transcript: str
    num_turns: int
    finish_reason: Literal["stop", "length"]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """The policy came to an end by itself."""
        return self.finish_reason == "stop"
