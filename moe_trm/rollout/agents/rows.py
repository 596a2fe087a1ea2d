"""The rows that a session's tree becomes on its way into the gradient (`agent.rows`). Pure.

A sampled token is scored in one row at most, and under `trajectory` and `turns` in exactly one, unless the rows that
could train it are rejected. What a row has in common with an earlier one is its context: the ids and routes are
forwarded as they were, and nothing of it is scored again.

| `agent.rows` | rows of a session |
|---|---|
| `last` | the branch of the last answer |
| `trajectory` | the same, then each other branch in the order in which they came, with the answers no row has yet |
| `turns` | one for each answer, with its history as context |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_trm.config.schema.agent import AgentRows
from moe_trm.errors import RecordRejected
from moe_trm.rollout.agents.tree import Node, SessionTree, conversation_of
from moe_trm.types import RolloutRecord, SessionTurn

NOT_CHOSEN = "not_chosen"
"""Reason of an answer that `agent.rows` leaves out."""


@dataclass(frozen=True)
class SessionRows:
    """The outcome of a session: its first row with the others behind it, the rejections of other rows in their order,
    and how many sampled tokens no row trains.
    """

    sample: RolloutRecord
    rejections: tuple[RecordRejected, ...]
    left_out: int

    @property
    def counts(self) -> Counter[str]:
        """`rows`, `left_out_tokens`, and `rejected_rows/<reason>`."""
        counter = Counter({"rows": len(self.sample.rows), "left_out_tokens": self.left_out})
        counter.update(f"rejected_rows/{rejection.reason}" for rejection in self.rejections)
        return counter


def session_rows(
    tree: SessionTree,
    how: AgentRows,
    *,
    prompt_id: str,
    sample_id: int,
    group_id: int,
    keep_changed: bool,
    finish_reason: str,
) -> SessionRows:
    """The rows of a session with at least one answer, as `how` (`agent.rows`) says.

    A rejected row costs itself alone: the answers before its last one go into the next row that has them. `prompt_id`,
    `sample_id`, `group_id` and `finish_reason` go into every row. `keep_changed`: see `Conversation.record`.

    Raises `RecordRejected` with the reason of the first row where none is left.
    """
    records: list[RolloutRecord] = []
    rejections: list[RecordRejected] = []
    row_of: dict[Node, int] = {}
    reasons: dict[Node, str] = {}
    for end in _ends(tree, how):
        trained_nodes = [end] if how == "turns" else [node for node in end.path() if node not in row_of]
        try:
            record = conversation_of(end, prompt_id, trained=trained_nodes).record(
                sample_id=sample_id,
                group_id=group_id,
                keep_changed=keep_changed,
                finish_reason=finish_reason,
                row=len(records),
            )
        except RecordRejected as rejection:
            rejections.append(rejection)
            reasons |= {node: reasons.get(node, rejection.reason) for node in trained_nodes}
            continue
        row_of |= dict.fromkeys(trained_nodes, len(records))
        records.append(record)
    if not records:
        raise rejections[0]
    shape = _shape(tree, row_of, reasons)
    first, *further = (replace(record, session=shape) for record in records)
    left_out = sum(turn.sampled for turn in shape if turn.row < 0)
    return SessionRows(replace(first, further=tuple(further)), tuple(rejections), left_out)


def spoken(leaf: Node, prompt_id: str, finish_reason: str) -> RolloutRecord:
    """The whole branch of `leaf` as a reward reads it; without routes, so that their faults do not matter here."""
    return conversation_of(leaf, prompt_id, routes=False).record(
        sample_id=-1, group_id=-1, keep_changed=True, finish_reason=finish_reason
    )


def _ends(tree: SessionTree, how: AgentRows) -> list[Node]:
    """The last answer of every row."""
    if how == "turns":
        return list(tree.nodes)
    # The newest answer has no successor yet: it is a leaf.
    last = tree.nodes[-1]
    return [last] if how == "last" else [last, *(leaf for leaf in tree.leaves() if leaf is not last)]


def _shape(tree: SessionTree, row_of: Mapping[Node, int], reasons: Mapping[Node, str]) -> tuple[SessionTurn, ...]:
    number = {node: place for place, node in enumerate(tree.nodes)}
    return tuple(
        SessionTurn(
            parent=-1 if node.parent is None else number[node.parent],
            added=len(node.context.added),
            sampled=node.turn.num_sampled,
            row=row_of.get(node, -1),
            cut=bool(node.context.cut),
            reason="" if node in row_of else reasons.get(node, NOT_CHOSEN),
            cut_by=node.context.cut,
            dialect=node.dialect,
        )
        for node in tree.nodes
    )
