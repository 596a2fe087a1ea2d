"""The forms of what the controller and an intake process say to each other (`moe_trm.runtime.child_messages`).

Arrays never travel here: they are in a block of the process's shared file (`moe_trm.runtime.shared_blocks`).
"""

from __future__ import annotations

import msgspec

from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.runtime.shared_blocks import Block


class IntakeSettings(msgspec.Struct, frozen=True):
    """Settings of an intake process.

    `answers` names the engine's `AnswerFormat` (`package.module:Class`). `timeout_s` and `max_attempts` are those of a
    request; `tokenizer` is a checkpoint's folder, empty for none.
    """

    answers: str
    model: ServedModel
    api_key: str | None
    timeout_s: float
    max_attempts: int
    tokenizer: str = ""


class WholeSample(msgspec.Struct, frozen=True):
    """The parts that make a whole sample of an answer: the process gives its record then."""

    sample_id: int
    group_id: int
    prompt_id: str
    keep_changed: bool


class IntakeCall(msgspec.Struct, frozen=True):
    """One answer of the server at `url`. `whole`: it is a sample, if no push cuts it."""

    url: str
    question: Question
    whole: WholeSample | None = None


class Parsed(msgspec.Struct, frozen=True):
    """The checked answer.

    `body` and the buffers of `block` are the frames of a `RolloutRecord` (`whole`) or of a `SampledTurn`. `retracted`
    and `written`: as in `Reading`.
    """

    body: bytes
    block: Block
    whole: bool
    retracted: bool
    written: tuple[str, str] | None = None
