from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_trm.store.ledger import Ledger
from moe_trm.store.store import SampleStore
from tests.unit.records import make_record


@given(st.lists(st.tuples(st.sampled_from(["admit", "reject"]), st.integers(0, 3)), max_size=40), st.integers(0, 2))
def test_the_ledger_balances_whatever_happens(events: list[tuple[str, int]], max_age: int) -> None:
    ledger = Ledger()
    store = SampleStore(ledger, max_age=max_age)
    for i, (event, version) in enumerate(events):
        ledger.issue()
        assert ledger.balanced
        if event == "reject":
            ledger.reject("mask_sum")
        else:
            store.admit(make_record(sample_id=i, version=version))
        assert ledger.balanced
    taken = store.take(version=3)
    assert ledger.balanced
    assert (ledger.queued, ledger.in_flight) == (0, 0)
    admitted = [(i, version) for i, (event, version) in enumerate(events) if event == "admit"]
    assert [record.sample_id for record in taken] == [i for i, version in admitted if 3 - version <= max_age]
    assert ledger.dropped["age"] == len(admitted) - len(taken)
    assert ledger.metrics()["ledger/issued"] == len(events)


def test_taking_twice_gives_nothing_twice() -> None:
    ledger = Ledger()
    store = SampleStore(ledger)
    ledger.issue()
    store.admit(make_record())
    assert len(store.take(0)) == 1
    assert store.take(0) == []
    assert ledger.trained == 1


def test_a_sample_counted_twice_is_noticed() -> None:
    ledger = Ledger()
    ledger.issue()
    ledger.reject("route_rows")
    ledger.reject("route_rows")
    assert not ledger.balanced
