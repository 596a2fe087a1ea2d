"""Groups keep their places, are taken in the order of issue, and the books balance whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.rollout.step_parts import versions_of
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.rollout.store.metrics import age_metrics
from moe_trm.rollout.store.store import GroupStore, Outcome
from moe_trm.types import RolloutRecord
from tests.unit.records import make_record


def opened(store: GroupStore, ledger: Ledger, group_id: int, size: int) -> None:
    store.open(group_id)
    for _ in range(size):
        ledger.issue()


def admit(
    store: GroupStore, ledger: Ledger, group_id: int, outcomes: Sequence[Outcome], drop: str | None = None
) -> None:
    for outcome in outcomes:
        if isinstance(outcome, str):
            ledger.reject(outcome)
    store.admit(group_id, outcomes, group_reason=lambda records: drop)


def group(group_id: int, versions: Sequence[int]) -> list[RolloutRecord]:
    return [make_record(sample_id=10 * group_id + i, group_id=group_id, version=v) for i, v in enumerate(versions)]


Fate = st.tuples(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2), st.booleans())


@given(st.lists(Fate, max_size=12), st.integers(0, 3), st.integers(0, 4), st.permutations(range(12)))
def test_the_ledger_balances_whatever_happens(
    fates: list[tuple[list[int], int, bool]], max_age: int, refills: int, finish: list[int]
) -> None:
    """Groups with records of some versions, some rejected samples, perhaps dropped whole, that finish in any order."""
    ledger = Ledger()
    store = GroupStore(ledger, max_age=max_age, refills=refills)
    for group_id, (versions, rejected, _) in enumerate(fates):
        opened(store, ledger, group_id, len(versions) + rejected)
    for group_id in [number for number in finish if number < len(fates)]:
        versions, rejected, drop = fates[group_id]
        admit(store, ledger, group_id, [*group(group_id, versions), *["mask_sum"] * rejected], "dull" if drop else None)
        assert ledger.balanced
    taken = []
    while (groups := store.take(1, version=3)) is not None:
        assert ledger.balanced
        taken += groups
    assert (ledger.in_flight, ledger.queued, len(store)) == (0, 0, 0)
    assert [g.group_id for g in taken] == sorted(g.group_id for g in taken)
    trained = [record for g in taken for record in g.kept]
    assert all(3 - int(record.versions.min()) <= max_age for record in trained)
    assert ledger.trained == len(trained)
    assert ledger.metrics()["ledger/issued"] == sum(len(versions) + rejected for versions, rejected, _ in fates)


def test_a_step_waits_for_its_oldest_group_whoever_is_first() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, max_age=1)
    for number in range(3):
        opened(store, ledger, number, 1)
    admit(store, ledger, 2, group(2, [0]))
    admit(store, ledger, 1, group(1, [0]))
    assert store.take(2, 0) is None
    admit(store, ledger, 0, group(0, [0]))
    assert [g.group_id for g in store.take(2, 0) or []] == [0, 1]
    assert store.take(2, 0) is None
    assert store.held() == [2]
    assert store.ages(1) == {1: 1}


def test_a_stale_group_is_dropped_whole_and_the_next_takes_its_place() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, max_age=1, refills=1)
    for number in range(2):
        opened(store, ledger, number, 2)
    admit(store, ledger, 0, group(0, [1, 3]))
    admit(store, ledger, 1, group(1, [3, 3]))
    assert [g.group_id for g in store.take(1, version=3) or []] == [1]
    assert ledger.dropped["age"] == 2
    assert [g.group_id for g in store.take_dropped()] == [0]
    assert store.take_dropped() == []


def test_a_stale_group_behind_a_fresh_one_is_dropped_before_both_are_taken() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, max_age=1)
    for number, version in enumerate([3, 1, 3, 1]):
        opened(store, ledger, number, 1)
        admit(store, ledger, number, group(number, [version]))
    taken = store.take(2, 3)
    assert taken is not None
    assert [(place.group_id, len(place.kept)) for place in taken] == [(0, 1), (1, 0)]
    assert ledger.dropped["age"] == 1, "what this batch does not take is not looked at"
    assert (ledger.trained, ledger.queued) == (1, 2)


def test_what_is_dropped_beyond_the_refills_leaves_its_place_empty() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, refills=1)
    for number in range(3):
        opened(store, ledger, number, 1)
        admit(store, ledger, number, group(number, [0]), drop="zero_variance" if number < 2 else None)
    taken = store.take(2, 0)
    assert taken is not None
    assert [(g.group_id, len(g.kept)) for g in taken] == [(1, 0), (2, 1)]
    assert ledger.dropped["zero_variance"] == 2


def test_each_group_that_is_replaced_costs_one_refill() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, refills=2)
    for number in range(3):
        opened(store, ledger, number, 1)
        admit(store, ledger, number, group(number, [0]), drop="zero_variance" if number < 2 else None)
    assert store.held() == [2]


def test_groups_that_are_sampled_or_empty_have_no_age() -> None:
    ledger = Ledger()
    store = GroupStore(ledger, max_age=1)
    opened(store, ledger, 0, 1)
    assert store.ages(1) == {}
    admit(store, ledger, 0, ["mask_sum"])
    assert store.ages(1) == {}


@pytest.mark.parametrize(("options", "held"), [({}, []), ({"ends_batch": False}, [2])])
def test_a_whole_batch_gives_its_refills_back_and_a_part_does_not(options: dict[str, bool], held: list[int]) -> None:
    ledger = Ledger()
    store = GroupStore(ledger, refills=1)
    for number in range(3):
        opened(store, ledger, number, 1)
    admit(store, ledger, 0, group(0, [0]), drop="zero_variance")
    admit(store, ledger, 1, group(1, [0]))
    assert len(store.take(1, 0, **options) or []) == 1
    admit(store, ledger, 2, group(2, [0]), drop="zero_variance")
    assert store.held() == held


def test_taking_twice_gives_nothing_twice() -> None:
    ledger = Ledger()
    store = GroupStore(ledger)
    opened(store, ledger, 0, 1)
    admit(store, ledger, 0, group(0, [0]))
    assert len(store.take(1, 0) or []) == 1
    assert store.take(1, 0) is None
    assert ledger.trained == 1


def test_a_sample_counted_twice_is_noticed() -> None:
    ledger = Ledger()
    ledger.issue()
    ledger.reject("route_rows")
    ledger.reject("route_rows")
    assert not ledger.balanced


def test_resumed_books_leave_out_what_is_issued_again() -> None:
    ledger = Ledger()
    store = GroupStore(ledger)
    for number in range(3):
        opened(store, ledger, number, 1)
    admit(store, ledger, 0, group(0, [0]))
    admit(store, ledger, 1, ["route_rows"])
    store.take(1, 0)
    opened(store, ledger, 3, 1)
    admit(store, ledger, 3, group(3, [0]))
    assert (ledger.in_flight, ledger.queued) == (1, 1)
    ledger.reuse(3)
    resumed = Ledger()
    resumed.restore(ledger.settled())
    assert resumed.reused == 3
    assert (resumed.issued, resumed.trained, resumed.rejected["route_rows"], resumed.in_flight) == (2, 1, 1, 0)
    assert resumed.balanced


def test_a_waiting_group_is_looked_at_once_however_often_a_step_asks() -> None:
    ledger = Ledger()
    store, looks = GroupStore(ledger), 0

    class Looked(np.ndarray[Any, Any]):
        def min(self, *args: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().min(*args, **options)

    def watched(record: RolloutRecord) -> RolloutRecord:
        return replace(record, versions=record.versions.view(Looked))

    opened(store, ledger, 0, 2)
    opened(store, ledger, 1, 1)
    admit(store, ledger, 0, [watched(record) for record in group(0, [3, 3])])
    for _ in range(5):
        assert store.take(2, 3) is None
    admit(store, ledger, 1, [watched(record) for record in group(1, [3])])
    taken = store.take(2, 3)
    assert taken is not None
    assert [one.oldest_version for one in taken] == [3, 3]
    assert looks == 3


def test_ages_of_tokens_and_rows_by_hand() -> None:
    versions = [[4, 4], [3, 4, 4], [], [2]]
    records = [
        replace(make_record(num_sampled=len(own) or 1), versions=np.array(own, dtype=np.int32)) for own in versions
    ]
    found = age_metrics(records, 4, {1: 2}, 1)
    assert found == {
        "rollout/age_mean": 0.5,
        "rollout/age_max": 2.0,
        "rollout/stale_tokens": 2.0,
        "rollout/mixed_rows": 1.0,
        "rollout/age_share/0": pytest.approx(4 / 6),
        "rollout/age_share/1": pytest.approx(1 / 6),
        "rollout/age_share/2": pytest.approx(1 / 6),
        "queue/groups": 2.0,
        "queue/age/0": 0.0,
        "queue/age/1": 2.0,
    }
    assert versions_of(records) == (2, 3, 4)
    assert versions_of([]) == ()


@given(st.integers(0, 6), st.integers(0, 2), st.integers(0, 3))
def test_refills_that_nobody_needed_do_not_pile_up(quiet: int, max_age: int, refills: int) -> None:
    """A batch may replace what it is given for itself, and for those that are sampled ahead of it."""
    ledger, number = Ledger(), 0
    store = GroupStore(ledger, max_age=max_age, refills=refills)
    for _ in range(quiet):
        opened(store, ledger, number, 1)
        admit(store, ledger, number, group(number, [0]))
        assert len(store.take(1, 0) or []) == 1
        number += 1
    for _ in range(20):
        opened(store, ledger, number, 1)
        admit(store, ledger, number, group(number, [0]), drop="zero_variance")
        number += 1
    assert 20 - len(store.held()) <= refills * (max_age + 1)
