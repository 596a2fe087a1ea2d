"""Rows of sessions: every sampled token is trained once or reported, whatever the tree and whatever is rejected."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.config.schema.agent import AgentRows
from moe_trm.errors import RecordRejected
from moe_trm.rollout.agents.rows import SessionRows, spoken
from moe_trm.rollout.agents.tree import SessionTree
from moe_trm.types import RolloutRecord
from routing import RouteError
from routing.layout.row_ids import ROW_STEP, row_name, row_of
from tests.unit.rollout.agents.made_sessions import ADDED, rows_of, size_of, tree_of
from tests.unit.rollout.agents.speaking_engine import logprob, route_row
from tests.unit.rollout.agents.talks import Talk
from tests.unit.rollout.agents.templates import TEMPLATES

ROWS: tuple[AgentRows, ...] = ("last", "trajectory", "turns")
# 0 - 1 - 2     one branch is left at 1, one at 0, and 5 begins anew
#   |   ` 4 - 6
#    ` 3     5
FORKED = [-1, 0, 1, 0, 1, -1, 4]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(1, 9))
    return [draw(st.integers(-1, number - 1)) for number in range(count)]


def trained(found: SessionRows) -> Counter[int]:
    """Sampled tokens by the answer that they are of, which is the version that sampled them."""
    return Counter(int(version) for row in found.sample.rows for version in row.versions)


def check_row(row: RolloutRecord, tree: SessionTree) -> None:
    """Every number of the row is that of the ids before it, and its routes are those of the whole branch."""
    ids, places = row.tokens.tolist(), np.flatnonzero(row.sampled)
    end = next(node for node in tree.nodes if list(node.token_ids) == ids)
    path = end.path()
    assert places[-1] == len(ids) - 1
    np.testing.assert_allclose(row.rollout_logprobs, [logprob(ids[:place]) for place in places], rtol=1e-6)
    depths = [depth for depth, node in enumerate(path) for _ in range(node.turn.num_sampled)]
    spans = [place for node in path for place in range(len(node.context.token_ids), len(node.token_ids))]
    depth_of = dict(zip(spans, depths, strict=True))
    assert row.turn_ids[places].tolist() == [depth_of[place] for place in places.tolist()]
    assert row.routes is not None
    row.routes.check_tokens(row.tokens, row.origin)
    assert np.array_equal(row.routes.experts, [route_row(ids[: end + 1]) for end in range(len(ids) - 1)])


@settings(max_examples=60)
@given(parents=trees(), how=st.sampled_from(ROWS))
def test_every_sampled_token_is_in_exactly_one_row(parents: list[int], how: AgentRows) -> None:
    tree = tree_of(parents)
    found = rows_of(tree, how)
    for number, row in enumerate(found.sample.rows):
        assert (row.sample_id, row.row, row.group_id, row.finish_reason) == (5, number, 1, "stop")
        assert (row.further, row.session) == ((), found.sample.session)
        check_row(row, tree)
    counts = trained(found)
    assert all(count == size_of(answer) for answer, count in counts.items())
    whole = sum(size_of(answer) for answer in range(len(parents)))
    assert found.left_out == whole - counts.total()
    assert not found.rejections
    if how != "last":
        assert set(counts) == set(range(len(parents)))
        assert found.left_out == 0
    assert len(found.sample.rows) == {"last": 1, "trajectory": len(tree.leaves()), "turns": len(parents)}[how]


@settings(max_examples=40)
@given(parents=trees(), how=st.sampled_from(ROWS), data=st.data())
def test_what_is_rejected_costs_its_own_row_and_is_counted(
    parents: list[int], how: AgentRows, data: st.DataObject
) -> None:
    """Routes of an answer are not those that sampled it: all rows through it are lost, all other answers trained."""
    bad = data.draw(st.integers(0, len(parents) - 1))
    tree = tree_of(parents, bad=[bad])
    lost = {number for number, node in enumerate(tree.nodes) if tree.nodes[bad] in node.path()}
    branch = {tree.nodes.index(node) for node in tree.nodes[-1].path()}
    requested = branch if how == "last" else set(range(len(parents)))
    if how != "turns":
        # A row trains what it can with its end: answers that only lead to bad ends are lost with them.
        ends = [tree.nodes[-1]] if how == "last" else tree.leaves()
        good = [end for end in ends if tree.nodes[bad] not in end.path()]
        lost |= requested - {tree.nodes.index(node) for end in good for node in end.path()}
    if requested <= lost:
        with pytest.raises(RecordRejected) as rejected:
            rows_of(tree, how)
        assert rejected.value.reason == "version_span"
        return
    found = rows_of(tree, how)
    assert set(trained(found)) == requested - lost
    assert found.left_out == sum(size_of(number) for number in range(len(parents))) - trained(found).total()
    assert [row.row for row in found.sample.rows] == list(range(len(found.sample.rows)))
    for number, turn in enumerate(found.sample.session):
        assert (turn.row < 0) == (number not in requested - lost)
        expected = "" if turn.row >= 0 else "version_span" if number in requested else "not_chosen"
        assert turn.reason == expected
    for row in found.sample.rows:
        check_row(row, tree)


def test_one_bad_leaf_among_good_ones_by_hand() -> None:
    """The last branch 0 1 4 6 is bad at its end: 0, 1 and 2 are a row, 3 is one behind 0, 5 is one by itself."""
    found = rows_of(tree_of(FORKED, bad=[6]), "trajectory")
    assert [sorted({int(version) for version in row.versions}) for row in found.sample.rows] == [[0, 1, 2], [3], [5]]
    assert [rejection.reason for rejection in found.rejections] == ["version_span"]
    assert found.left_out == size_of(4) + size_of(6)
    assert found.counts == {"rows": 3, "left_out_tokens": 5, "rejected_rows/version_span": 1}
    assert [turn.row for turn in found.sample.session] == [0, 0, 0, 1, -1, 2, -1]
    assert [turn.reason for turn in found.sample.session] == ["", "", "", "", "version_span", "", "version_span"]
    # The context of row 1 is prompt, answer 0 and what was said before answer 3.
    first = 2 * ADDED + size_of(0)
    assert found.sample.rows[1].sampled.tolist() == [False] * first + [True] * size_of(3)
    kept = rows_of(tree_of(FORKED, bad=[6]), "trajectory", keep_changed=True)
    assert not kept.rejections
    covered = kept.sample.routes
    assert covered is not None
    assert covered.covered is not None
    # Routes before the second token of answer 6 may be those of other weights; all other rows are whole.
    assert covered.covered.tolist() == [False] * (covered.num_rows - 1) + [True]
    assert all(row.routes is not None and row.routes.covered is None for row in kept.sample.further)


@given(parents=trees())
def test_the_first_row_of_all_branches_is_the_row_of_the_last_one(parents: list[int]) -> None:
    alone, whole = (rows_of(tree_of(parents), how).sample.rows[0] for how in ("last", "trajectory"))
    for name in ("tokens", "sampled", "turn_ids", "rollout_logprobs", "full_logprobs", "versions"):
        assert np.array_equal(getattr(alone, name), getattr(whole, name)), name
    assert alone.routes is not None
    assert whole.routes is not None
    assert alone.routes.token_digest == whole.routes.token_digest


def test_routes_of_one_row_are_not_those_of_another_with_the_same_ids() -> None:
    """Two rows of one sample may end with the same tokens; the digest tells them apart, as it tells samples."""
    first, second = rows_of(tree_of([-1, 0]), "turns").sample.rows
    assert first.routes is not None
    assert second.routes is not None
    assert (first.row_id, second.row_id) == (5, 5 + ROW_STEP)
    assert (row_of(second.row_id), row_name(second.row_id)) == ((5, 1), "sample 5, row 1")
    assert (row_of(-1), row_name(7)) == ((-1, 0), "sample 7")
    with pytest.raises(RouteError, match="other tokens"):
        second.routes.check_tokens(second.tokens, first.origin)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    rng=st.randoms(use_true_random=False),
    turns=st.integers(2, 8),
    how=st.sampled_from(ROWS[1:]),
)
def test_rows_of_real_conversations(name: str, rng: random.Random, turns: int, how: AgentRows) -> None:
    """Tools, thinking and edits of the history, through the templates: answer `n` is of version `n`."""
    talk = Talk(name, rng, 0.4)
    talk.go(turns)
    found = rows_of(talk.tree, how)
    sampled = Counter({int(node.turn.versions[0]): node.turn.num_sampled for node in talk.tree.nodes})
    assert trained(found) == sampled
    assert found.left_out == 0
    for row in found.sample.rows:
        check_row(row, talk.tree)
    assert [turn.cut_by for turn in found.sample.session] == [context.cut for context in talk.contexts]


def test_the_reward_reads_the_whole_last_branch_whatever_the_rows_are() -> None:
    tree = tree_of(FORKED, bad=[6])
    record = spoken(tree.nodes[-1], "p", "length")
    assert record.tokens.tolist() == list(tree.nodes[-1].token_ids)
    assert record.num_sampled == sum(size_of(answer) for answer in (0, 1, 4, 6))
    assert (record.finish_reason, record.routes, record.turn_ids.max()) == ("length", None, 3)
