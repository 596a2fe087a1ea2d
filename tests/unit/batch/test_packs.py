"""Packs of rows: nothing is lost, budgets hold, ranks are even, and hardly a column is computed for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.batch.plan import pack, packed_load, plan_metrics, plan_step
from moe_trm.errors import ControllerError
from moe_trm.types import TrainRow
from routing.layout.packed import packed_places
from tests.unit.records import make_record


def rows_of(lengths: list[int]) -> list[TrainRow]:
    return [TrainRow(make_record(sample_id=i, num_prompt=1, num_sampled=n)) for i, n in enumerate(lengths)]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=0, max_size=40),
    data_size=st.integers(1, 4),
    budget=st.integers(60, 400),
)
def test_no_pack_exceeds_the_budget_and_no_row_is_lost(lengths: list[int], data_size: int, budget: int) -> None:
    shares = pack(lengths, data_size, budget)
    assert len(shares) == data_size
    assert len({len(share) for share in shares}) == 1
    assert max(packed_load(lengths, [rows]) for share in shares for rows in share) <= budget
    assert sorted(i for share in shares for rows in share for i in rows) == list(range(len(lengths)))
    assert pack(lengths, data_size, budget) == shares


def test_packs_by_hand() -> None:
    assert pack([8, 8, 4, 4], 1, 24) == [[[0, 1, 2, 3]]]
    assert pack([8, 8, 4, 4], 1, 12) == [[[0, 2], [1, 3]]]
    assert pack([8, 8, 4, 4], 2, 12) == [[[0, 2]], [[1, 3]]]
    # The fullest of each round goes to the rank that has least so far.
    assert pack([10, 9, 8, 1], 2, 10) == [[[0], [3]], [[1], [2]]]
    assert pack([5], 2, 16) == [[[0]], [[]]]
    assert pack([], 2, 16) == [[[]], [[]]]


@pytest.mark.parametrize(("num_rows", "data_size", "budget"), [(64, 2, 8192), (64, 4, 8192), (256, 8, 16384)])
def test_ranks_are_even_with_skewed_lengths(num_rows: int, data_size: int, budget: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.clip(rng.lognormal(5.5, 1.0, num_rows).astype(int) + 20, 20, 4000).tolist()
        loads = [packed_load(lengths, share) for share in pack(lengths, data_size, budget)]
        assert max(loads) < 1.05 * sum(loads) / data_size


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), limit=st.integers(1, 8), ranks=st.integers(1, 3))
def test_packs_by_rows_have_like_numbers_of_tokens(lengths: list[int], limit: int, ranks: int) -> None:
    settings: dict[str, Any] = {"minibatches": 1, "data_size": ranks, "micro_batch_rows": limit, "packed": True}
    plan = plan_step(rows_of(lengths), seed=0, step=1, **settings)
    micro = [each for share in plan for each in share[0].micro_batches]
    assert all(len(each.rows) <= limit for each in micro)
    assert sorted(row.record.sample_id for each in micro for row in each.rows) == list(range(len(lengths)))
    for share in plan:
        loads = [sum(row.record.num_tokens - 1 for row in each.rows) for each in share[0].micro_batches]
        assert max(loads) - min(loads) <= max(lengths)


def test_columns_for_each_real_token() -> None:
    """Median 400 and 99th percentile 4,000 tokens, shared by four ranks."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(400), np.log(10) / 2.326, 256).astype(int), 2, 8000).tolist()
    settings: dict[str, Any] = {"minibatches": 2, "data_size": 4, "micro_batch_tokens": 16384}
    packed = plan_step(rows_of(lengths), seed=0, step=1, **settings, packed=True)
    assert plan_metrics(packed, packed=True)["batch/padding_fraction"] == 0.0
    assert plan_metrics(packed, packed=True)["batch/rank_imbalance"] < 0.05
    # Two context- and two tensor-parallel ranks need a multiple of four places of every row.
    shared = plan_metrics(packed, packed=True, context=2, tensor=2)["batch/padding_fraction"]
    assert 0 < shared < 0.02
    assert plan_metrics(plan_step(rows_of(lengths), seed=0, step=1, **settings))["batch/padding_fraction"] > shared


def test_alignment_is_counted_as_padding() -> None:
    plan = plan_step(rows_of([5, 3]), seed=0, step=1, minibatches=1, data_size=1, packed=True)
    assert packed_places([5, 3], 2) == (8, 4)
    assert plan_metrics(plan, packed=True, context=2) == {
        "batch/micro_batches": 1.0,
        "batch/padding_fraction": pytest.approx(1 - 8 / 12),
        "batch/rank_imbalance": 0.0,
    }


def test_a_row_longer_than_the_budget_is_an_error_that_names_it() -> None:
    with pytest.raises(ControllerError, match="sample 1"):
        plan_step(rows_of([3, 30]), seed=0, step=1, minibatches=1, data_size=1, micro_batch_tokens=29, packed=True)
