"""From samples of several rows to the rows of a plan: advantages by sample, samples whole in their minibatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.advantages.by_name import outcome_advantages
from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.batch.train_rows import num_sampled, train_rows
from moe_trm.rollout.step_parts import versions_of
from moe_trm.sampling_mask.violation import drop
from moe_trm.types import MicroBatch, RolloutRecord, TrainRow
from tests.unit.advantages import of_samples
from tests.unit.records import make_record, split_record
from tests.unit.rollout.agents.made_sessions import sample_of, size_of

cuts = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=12)


def samples(sizes: list[list[int]]) -> list[RolloutRecord]:
    return [
        split_record(make_record(sample_id=i, group_id=i // 3, num_sampled=sum(own), reward=float(i % 2)), own)
        for i, own in enumerate(sizes)
    ]


@given(sizes=cuts)
def test_rows_share_the_advantage_of_their_sample(sizes: list[list[int]]) -> None:
    """Group baselines count samples: cut or whole, the sums are the same."""
    made = samples(sizes)
    rewards, groups = np.array([one.reward for one in made]), np.array([one.group_id for one in made])
    tokens = np.array([num_sampled(one) for one in made])
    assert tokens.tolist() == [sum(own) for own in sizes]
    values = outcome_advantages("rloo", rewards, groups, tokens)
    for sample, value, own, found in zip(made, values, sizes, of_samples(made, "rloo"), strict=True):
        rows = train_rows(sample)
        assert [values.tolist() for values in found] == [[value] * count for count in own]
        assert {row.sample_tokens for row in rows} == ({None} if len(own) == 1 else {sum(own)})
        batch = collate(MicroBatch(tuple(rows)), keep_mask=True)
        assert int(batch.mask.sum()) == sum(own)
        assert batch.sample_ids == tuple(row.record.row_id for row in rows)
        if len(own) == 1:
            assert batch.sample_tokens is None
        else:
            assert batch.sample_tokens is not None
            assert batch.sample_tokens.tolist() == [sum(own)] * len(own)


def test_a_micro_batch_of_whole_and_cut_samples() -> None:
    made = samples([[3], [1, 2], [2]])
    rows = [row for sample in made for row in train_rows(sample)]
    tokens = collate(MicroBatch(tuple(rows)), keep_mask=False).sample_tokens
    assert tokens is not None
    assert tokens.tolist() == [3, 3, 3, 2]


@given(
    sizes=cuts,
    minibatches=st.integers(1, 4),
    data_size=st.integers(1, 4),
    limit=st.one_of(
        st.just({"micro_batch_tokens": 64}), st.integers(1, 8).map(lambda most: {"micro_batch_rows": most})
    ),
    step=st.integers(1, 5),
)
def test_a_sample_is_in_one_minibatch_and_counts_once(
    sizes: list[list[int]], minibatches: int, data_size: int, limit: dict[str, Any], step: int
) -> None:
    """Every row is planned once, no update is without a sample, and the same step is planned the same way again."""
    rows = [row for sample in samples(sizes) for row in train_rows(sample)]
    settings: dict[str, Any] = {"seed": 0, "step": step, "minibatches": minibatches, "data_size": data_size, **limit}
    plan = plan_step(rows, **settings)
    assert plan == plan_step(rows, **settings)
    # Fewer samples than minibatches are as many minibatches as samples: none is empty.
    assert [len(share) for share in plan] == [min(minibatches, len(sizes))] * data_size
    seen: list[int] = []
    for index in range(len(plan[0])):
        micros = [share[index].micro_batches for share in plan]
        assert len({*map(len, micros)}) == 1
        assert all(len(micro.rows) <= limit.get("micro_batch_rows", 64) for own in micros for micro in own)
        own: list[TrainRow] = [row for parts in micros for micro in parts for row in micro.rows]
        assert own
        numbers = {row.record.sample_id for row in own}
        assert {share[index].num_sequences for share in plan} == {len(numbers)}
        assert {share[index].num_tokens for share in plan} == {sum(row.record.num_sampled for row in own)}
        assert sorted(row.record.row_id for row in own) == sorted(
            row.record.row_id for row in rows if row.record.sample_id in numbers
        )
        seen += [row.record.row_id for row in own]
    assert sorted(seen) == sorted(row.record.row_id for row in rows)


def test_turns_of_branches_are_compared_once_for_a_sample() -> None:
    """Two sessions of one prompt: 0 - 1 - 2 with a branch 3 at 0, reward 1; and one answer, reward 0.

    Turn 0 of both is compared; turns 1 and 2 are the first session's alone, and 3 is a second answer of turn 1.
    """
    forked = sample_of([-1, 0, 1, 0], "trajectory", sample_id=0, reward=1.0)
    single = sample_of([-1], "trajectory", sample_id=1, reward=0.0)
    values = of_samples([forked, single], "turn_grpo", advantage={"normalize_std": False, "turn_discount": 0.5})
    # The rows are 0 3 and then 1 2; returns of turns 0 and 1 are 1/4 and 1/2, three turns being the longest branch.
    expected = [[0.125] * size_of(0) + [0.5] * size_of(3), [0.5] * size_of(1) + [1.0] * size_of(2)]
    assert [own.tolist() for own in values[0]] == [pytest.approx(own) for own in expected]
    assert [own.tolist() for own in values[1]] == [pytest.approx([-0.125] * size_of(0))]


@pytest.mark.parametrize("how", ["trajectory", "turns"])
def test_turn_level_advantages_do_not_depend_on_the_rows(how: str) -> None:
    parents = [-1, 0, 1, 0, 1]
    made = [sample_of(parents, how, sample_id=n, reward=float(n == 0)) for n in range(2)]  # type: ignore[arg-type]
    by_version: dict[tuple[int, int], float] = {}
    for sample, own in zip(made, of_samples(made, "turn_grpo", advantage={"turn_discount": 0.7}), strict=True):
        turns = np.concatenate([row.turn_ids[row.sampled] for row in sample.rows])
        assert len(turns) == sum(map(len, own)) == num_sampled(sample)
        for turn, value in zip(turns.tolist(), np.concatenate(own).tolist(), strict=True):
            assert by_version.setdefault((sample.sample_id, turn), value) == value
    assert len(by_version) == 6


def test_a_changed_record_differs_in_the_named_fields_alone() -> None:
    record = make_record()
    changed = record.changed(reward=3.0, further=())
    assert changed == replace(record, reward=3.0, further=())
    assert (record.reward, changed.reward) == (1.0, 3.0)
    with pytest.raises(AssertionError, match="fields of a record"):
        record.changed(rewards=3.0)


@given(dropped=st.sets(st.integers(0, 4)))
def test_scored_tokens_are_those_with_kept_ids(dropped: set[int]) -> None:
    record = make_record()
    assert record.sampling_mask is not None
    wrong = np.isin(np.arange(5), [*dropped])
    left = record.changed(sampling_mask=drop(record.sampling_mask, wrong))
    assert left.num_scored == int(left.scored.sum()) == 5 - len(dropped)
    assert record.changed(sampling_mask=None).num_scored == 5


def test_versions_of_a_step_are_told_once_and_ascending() -> None:
    records = [make_record(version=version) for version in (7, 3, 7)]
    assert versions_of(records) == (3, 7)
    assert versions_of([]) == ()
    assert all(type(version) is int for version in versions_of(records))


@given(dropped=st.sets(st.integers(0, 4)), first=st.integers(1, 4))
def test_the_denominator_of_a_cut_sample_counts_the_scored_tokens_of_its_rows(dropped: set[int], first: int) -> None:
    record = make_record()
    assert record.sampling_mask is not None
    mask = drop(record.sampling_mask, np.isin(np.arange(5), [*dropped]))
    rows = train_rows(split_record(record.changed(sampling_mask=mask), [first, 5 - first]))
    scored = int(collate(MicroBatch(tuple(rows)), keep_mask=True).mask.sum())
    assert [row.sample_tokens for row in rows] == [scored, scored]
    assert scored == 5 - len(dropped)
