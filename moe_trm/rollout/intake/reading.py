"""The bytes of one answer as a checked turn, or as the record of a whole sample: what an intake process computes.

Pure: no connection, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.rollout.intake.messages import WholeSample
from moe_trm.rollout.servers.continuation import settled
from moe_trm.rollout.servers.question import AnswerFormat, Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.tasks.rewards import written_text
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord, SampledTurn


@dataclass(frozen=True)
class Reading:
    """A checked answer: the record of a whole sample, else the turn, also where a push cut a sample.

    `retracted`: as in `SampledTurn`. `written`: `tasks.rewards.written_text` of a whole sample, where there is a
    tokenizer.
    """

    value: RolloutRecord | SampledTurn
    retracted: bool
    written: tuple[str, str] | None = None


def read(
    body: bytes | memoryview,
    question: Question,
    whole: WholeSample | None,
    model: ServedModel,
    tokens: Tokens | None,
    form: AnswerFormat,
) -> Reading:
    """Parse and check one answer of an engine's server.

    Raises `RecordRejected` as `AnswerFormat.parse` and `Conversation.record` do.
    """
    turn = form.parse(body, question, model)
    if whole is None or (finished := settled(turn, question.params)).finish_reason == "abort":
        return Reading(turn, turn.retracted)
    conversation = Conversation(Prompt(whole.prompt_id, question.context))
    conversation.add(finished)
    record = conversation.record(sample_id=whole.sample_id, group_id=whole.group_id, keep_changed=whole.keep_changed)
    if tokens is None:
        return Reading(record, turn.retracted)
    return Reading(record, turn.retracted, written_text(tokens, len(question.context), record))
