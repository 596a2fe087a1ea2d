"""Session trees of any shape, made of numbers: answer `n` is sampled by weight version `n`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from moe_trm.config.schema.agent import AgentRows
from moe_trm.rollout.agents.rows import SessionRows, session_rows
from moe_trm.rollout.agents.template import ChatTemplate
from moe_trm.rollout.agents.tree import Context, SessionTree
from moe_trm.rollout.agents.turn_boundary import TextAnswer
from moe_trm.types import RolloutRecord
from tests.unit.rollout.agents.speaking_engine import turn_of
from tests.unit.rollout.agents.templates import tokens_of

ADDED = 2
"""Tokens that are said before each answer."""


def tree_of(
    parents: Sequence[int], *, bad: Collection[int] = (), cut: Collection[int] = (), stale: bool = True
) -> SessionTree:
    """The tree in which answer `n` continues answer `parents[n]`, or begins a branch at the root where that is -1.

    Args:
        parents: of each answer, an earlier one or -1.
        bad: answers whose first token was sampled by other weights than the rest, with routes computed again.
        cut: answers before which the template changed earlier text.
        stale: answers are of different weight versions; else all are of version 0.
    """
    tree = SessionTree(ChatTemplate(tokens_of("chatml")))
    for number, parent in enumerate(parents):
        before = tree.nodes[parent] if parent >= 0 else None
        context = Context(
            before, None, "", tuple(range(100 * number, 100 * number + ADDED)), cut="template" if number in cut else ""
        )
        said = [100 * number + 10 + place for place in range(size_of(number))]
        turn = turn_of(context.token_ids, said, start=context.known_rows, version=number if stale else 0)
        tree.add(context, replace(turn, recomputed=1) if number in bad else turn, TextAnswer(None, "", ""))
    return tree


def size_of(number: int) -> int:
    """Sampled tokens of answer `number`."""
    return 2 + number % 3


def rows_of(tree: SessionTree, how: AgentRows, *, sample_id: int = 5, keep_changed: bool = False) -> SessionRows:
    return session_rows(
        tree,
        how,
        prompt_id="p",
        sample_id=sample_id,
        group_id=1,
        keep_changed=keep_changed,
        finish_reason="stop",
    )


def sample_of(
    parents: Sequence[int], how: AgentRows, *, sample_id: int = 5, group_id: int = 1, reward: float = 1.0
) -> RolloutRecord:
    """A rewarded sample with all its rows, of one weight version."""
    sample = rows_of(tree_of(parents, stale=False), how, sample_id=sample_id).sample

    def rewarded(row: RolloutRecord) -> RolloutRecord:
        return replace(row, group_id=group_id, reward=reward, further=tuple(map(rewarded, row.further)))

    return rewarded(sample)
