from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.batch.collate import collate
from moe_trm.batch.partition import cost, imbalance, partition
from moe_trm.batch.plan import plan_metrics, plan_step
from moe_trm.errors import ControllerError, RecordRejected
from moe_trm.sampling_mask.violation import drop
from moe_trm.types import MicroBatch, MiniBatch, TrainRow
from tests.unit.advantages import valued
from tests.unit.records import make_record


def test_ranks_get_like_numbers_of_tokens() -> None:
    rng = np.random.default_rng(0)
    rows = [TrainRow(make_record(sample_id=i, num_sampled=int(n))) for i, n in enumerate(rng.integers(1, 100, 64))]
    plan = plan_step(rows, seed=0, step=1, minibatches=2, data_size=2, micro_batch_rows=16)
    for index in range(2):
        tokens = [
            sum(row.record.num_tokens for micro in share[index].micro_batches for row in micro.rows) for share in plan
        ]
        assert max(tokens) / min(tokens) < 1.05


@given(
    lengths=st.lists(st.integers(1, 60), min_size=0, max_size=40),
    minibatches=st.integers(1, 3),
    data_size=st.integers(1, 4),
    budget=st.integers(64, 400),
)
def test_no_micro_batch_exceeds_the_token_budget_and_no_row_is_lost(
    lengths: list[int], minibatches: int, data_size: int, budget: int
) -> None:
    rows = [TrainRow(make_record(sample_id=i, num_sampled=n)) for i, n in enumerate(lengths)]
    settings: dict[str, Any] = {"minibatches": minibatches, "data_size": data_size, "micro_batch_tokens": budget}
    plan = plan_step(rows, seed=0, step=1, **settings)
    seen = []
    for share in plan:
        for mini, other in zip(share, plan[0], strict=True):
            assert len(mini.micro_batches) == len(other.micro_batches) >= 1
            for micro in mini.micro_batches:
                batch = collate(micro, keep_mask=True)
                assert batch.input_ids.numel() <= budget
                seen += [row.record.sample_id for row in micro.rows]
    assert sorted(seen) == list(range(len(lengths)))
    assert plan_step(rows, seed=0, step=1, **settings) == plan


@pytest.mark.parametrize(("num_rows", "data_size", "budget"), [(64, 2, 8192), (64, 4, 8192), (256, 8, 16384)])
def test_ranks_are_even_under_a_token_budget_with_skewed_lengths(num_rows: int, data_size: int, budget: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.clip(rng.lognormal(5.5, 1.0, num_rows).astype(int) + 20, 20, 4000).tolist()
        shares = partition(lengths, data_size, budget)
        assert imbalance(lengths, shares) < 1.05
        assert len({len(share) for share in shares}) == 1
        assert max(cost(lengths, rows) for share in shares for rows in share) <= budget
        assert sorted(i for share in shares for rows in share for i in rows) == list(range(num_rows))


def test_the_fewest_micro_batches_that_the_budget_allows() -> None:
    assert partition([8, 8, 4, 4], 1, 16) == [[[0, 1], [2, 3]]]
    assert partition([8, 8, 8, 8], 2, 16) == [[[0, 1]], [[2, 3]]]
    assert partition([5], 2, 16) == [[[0]], [[]]]
    assert partition([], 2, 16) == [[[]], [[]]]


def test_micro_batches_that_ranks_lack_are_cut_where_padding_is_saved() -> None:
    """The middle one of the runs 15, 5 5 3 and 1 has padding. Where none has, the last row of the last goes alone."""
    assert partition([15, 5, 5, 3, 1], 4, 30) == [[[0]], [[1, 2]], [[3]], [[4]]]
    assert partition([8, 1, 1, 1], 3, 16) == [[[0]], [[1, 2]], [[3]]]
    assert partition([8, 1], 3, 16) == [[[0]], [[1]], [[]]]


def test_rows_are_looked_at_a_few_times_also_for_hundreds_of_ranks() -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.looks += 1
            return super().__getitem__(index)

    lengths = np.clip(np.random.default_rng(0).lognormal(7, 1.0, 2048).astype(int) + 20, 20, 32768).tolist()
    shares = partition(Counted(lengths), 512, 32768)
    assert sorted(i for share in shares for rows in share for i in rows) == list(range(2048))
    assert Counted.looks < 200 * len(lengths)


def test_a_row_longer_than_the_budget_is_an_error_that_names_it() -> None:
    rows = [TrainRow(make_record(sample_id=i, num_sampled=n)) for i, n in enumerate([3, 30])]
    with pytest.raises(ControllerError, match="sample 1") as error:
        plan_step(rows, seed=0, step=1, minibatches=1, data_size=1, micro_batch_tokens=32)
    assert "33 forwarded tokens" in str(error.value)


def test_how_well_a_step_is_cut() -> None:
    rows = [TrainRow(make_record(sample_id=i, num_prompt=1, num_sampled=n)) for i, n in enumerate([8, 4, 4, 4])]
    by_rows = plan_step(rows, seed=0, step=1, minibatches=1, data_size=2, micro_batch_rows=4)
    assert plan_metrics(by_rows) == {
        "batch/micro_batches": 1.0,
        "batch/padding_fraction": pytest.approx(1 - 20 / 24),
        "batch/rank_imbalance": pytest.approx(16 / 12 - 1),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_the_least_even_minibatch_counts_wherever_it_stands(order: int) -> None:
    def rank(*lengths: int) -> list[MiniBatch]:
        rows = [TrainRow(make_record(sample_id=i, num_prompt=1, num_sampled=n)) for i, n in enumerate(lengths)]
        return [MiniBatch((MicroBatch((row,)),), 1, 1) for row in rows][::order]

    assert plan_metrics([rank(9, 4, 4), rank(3, 4, 5)])["batch/rank_imbalance"] == pytest.approx(9 / 6 - 1)


def test_collate_puts_every_value_on_the_row_that_predicts_it() -> None:
    first = make_record(sample_id=1, num_prompt=3, num_sampled=2)
    second = make_record(sample_id=2, num_prompt=2, num_sampled=6)
    batch = valued((TrainRow(first), TrainRow(second)), 1.5, -2.0, keep_mask=True)
    assert batch.input_ids.shape == (2, 7)
    assert batch.sample_ids == (1, 2)
    for row, (record, advantage) in enumerate([(first, 1.5), (second, -2.0)]):
        n = record.num_tokens - 1
        assert batch.valid[row].tolist() == [True] * n + [False] * (7 - n)
        assert batch.input_ids[row, :n].tolist() == record.tokens[:-1].tolist()
        assert batch.target_ids[row, :n].tolist() == record.tokens[1:].tolist()
        scored = batch.mask[row].nonzero().flatten().tolist()
        assert scored == list(range(n - record.num_sampled, n))
        assert batch.rollout_logprobs[row, scored].tolist() == record.rollout_logprobs.tolist()
        assert batch.advantages[row].tolist() == [advantage if i in scored else 0.0 for i in range(7)]
    assert batch.kept_ids is not None
    assert batch.kept_offsets is not None
    targets = batch.target_ids[batch.mask].tolist()
    for i, target in enumerate(targets):
        start, end = batch.kept_offsets[i : i + 2].tolist()
        assert target in batch.kept_ids[start:end].tolist()
    assert len(batch.kept_offsets) == len(targets) + 1


def test_a_dropped_token_is_neither_scored_nor_counted() -> None:
    record = make_record(num_prompt=3, num_sampled=4)
    assert record.sampling_mask is not None
    dropped = drop(record.sampling_mask, np.array([False, True, False, False]))
    row = TrainRow(replace(record, sampling_mask=dropped))
    batch = valued((row,), keep_mask=True)
    assert batch.mask[0].tolist() == [False, False, True, False, True, True]
    assert batch.advantages[0].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert batch.versions[0].tolist() == [-1, -1, 0, -1, 0, 0]
    assert batch.kept_offsets is not None
    assert batch.kept_logprobs is not None
    assert batch.kept_offsets.tolist() == [0, 3, 6, 9]
    assert len(batch.kept_logprobs) == 9
    [[mini]] = plan_step([row], seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=1)
    assert mini.num_tokens == 3


def test_a_mask_without_log_probs_is_refused() -> None:
    record = make_record()
    assert record.sampling_mask is not None
    ids_only = replace(record.sampling_mask, logprobs=None)
    with pytest.raises(RecordRejected, match="with its log-probs"):
        collate(MicroBatch((TrainRow(replace(record, sampling_mask=ids_only)),)), keep_mask=True)


def test_an_empty_micro_batch_is_padding_only() -> None:
    batch = collate(MicroBatch(()), keep_mask=True)
    assert batch.input_ids.shape[0] == 1
    assert batch.sample_ids == (-1,)
    assert not batch.valid.any()
    assert not batch.mask.any()
    assert batch.routes == (None,)
    assert batch.kept_offsets is not None
    assert batch.kept_offsets.tolist() == [0]
