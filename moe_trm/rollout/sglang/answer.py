"""One JSON answer of SGLang's `/generate` as a whole record."""

from __future__ import annotations

from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.rollout.sglang.parse import parse_turn
from moe_trm.rollout.turn import naming
from moe_trm.types import Prompt, RolloutRecord


def parse_answer(
    body: bytes, prompt: Prompt, model: ServedModel, wanted: RequestedFields, *, sample_id: int, group_id: int
) -> RolloutRecord:
    """The record of a sample of one answer.

    Raises `RecordRejected` as `parse_turn` and `Conversation.record` do, naming the sample.
    """
    conversation = Conversation(prompt)
    with naming(f"sample {sample_id}"):
        conversation.add(parse_turn(body, prompt.token_ids, model, wanted))
        return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=wanted.missing == "native")
