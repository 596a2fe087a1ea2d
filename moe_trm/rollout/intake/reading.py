"""The bytes of one answer as a checked turn, or as the record of a whole sample: what an intake process computes.

Pure: no connection, no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.rollout.intake.messages import Question
from moe_trm.rollout.servers.continuation import settled
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.parse import parse_turn
from moe_trm.tasks.rewards import written_text
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord, SampledTurn


@dataclass(frozen=True)
class Reading:
    """A checked answer.

    Attributes:
        value: the record of a whole sample; else the turn, also where a push cut what was to be a whole sample.
        retracted: as in `SampledTurn`.
        written: `tasks.rewards.written_text` of a whole sample, where a tokenizer was there.
    """

    value: RolloutRecord | SampledTurn
    retracted: bool
    written: tuple[str, str] | None = None


def read(body: bytes | memoryview, question: Question, model: ServedModel, tokens: Tokens | None) -> Reading:
    """Parse and check one answer of SGLang's `/generate`.

    Raises `RecordRejected` as `parse_turn` and `Conversation.record` do.
    """
    context, whole = question.request["input_ids"], question.whole
    turn = parse_turn(body, context, model, question.wanted, start=question.start)
    if whole is None or (finished := settled(turn, whole.params)).finish_reason == "abort":
        return Reading(turn, turn.retracted)
    conversation = Conversation(Prompt(whole.prompt_id, tuple(context)))
    conversation.add(finished)
    record = conversation.record(sample_id=whole.sample_id, group_id=whole.group_id, keep_changed=whole.keep_changed)
    if tokens is None:
        return Reading(record, turn.retracted)
    return Reading(record, turn.retracted, written_text(tokens, len(context), record))
