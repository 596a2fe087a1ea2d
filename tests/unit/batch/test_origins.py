"""Routes on their way from the engine to the learner stay with the sample and the weights that they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.batch.collate import collate
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.step.passes import anchor_source, behavior_source, update_source
from moe_trm.types import MicroBatch, RolloutRecord, TrainRow
from routing import RouteError, sample_origin
from routing.record.sources import ReplayRecords
from tests.unit.records import make_record
from tests.unit.routing.cuts import check_records


def twins() -> list[RolloutRecord]:
    """Two samples of one version and one of another, with the same tokens and each with routes of its own."""
    first = make_record(sample_id=4, version=2)
    assert first.routes is not None
    made = []
    for number, (sample_id, version) in enumerate([(4, 2), (5, 2), (4, 1)]):
        routes = replace(first.routes, experts=np.roll(first.routes.experts, number, axis=0))
        made.append(replace(first, sample_id=sample_id, versions=np.full(5, version, np.int32), routes=routes).bound())
    return made


def check(records: list[RolloutRecord], source: ReplayRecords | None = None) -> None:
    batch = collate(MicroBatch(tuple(TrainRow(record) for record in records)), keep_mask=True)
    source = source or batch.rollout_routes
    check_records(source.records, batch.input_ids, batch.target_ids, batch.valid, origins=source.origins)


def exchanged(records: list[RolloutRecord], one: int, other: int) -> list[RolloutRecord]:
    routes = [record.routes for record in records]
    routes[one], routes[other] = routes[other], routes[one]
    return [replace(record, routes=own) for record, own in zip(records, routes, strict=True)]


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
def test_an_exchange_of_routes_between_samples_of_the_same_tokens_is_found(one: int, other: int) -> None:
    check(twins())
    with pytest.raises(RouteError, match="another sample") as caught:
        check(exchanged(twins(), one, other))
    assert f"row {one} of the micro-batch" in str(caught.value)


def test_every_replayed_pass_knows_what_its_routes_are_bound_to() -> None:
    batch = collate(MicroBatch(tuple(TrainRow(record) for record in twins())), keep_mask=True)
    assert batch.origins == tuple(record.origin for record in twins())
    sources = [behavior_source("R3", batch, 1), anchor_source("R3", batch), update_source("R3", batch, None)]
    for source in sources:
        assert isinstance(source, ReplayRecords)
        assert replace(source, at_sampling=(), prompts=()) == ReplayRecords(batch.routes, batch.origins)
    assert collate(MicroBatch(()), keep_mask=True).origins == (None,)


def test_an_exchange_within_a_bundle_is_found(tmp_path: Path) -> None:
    BundleWriter(str(tmp_path)).write(1, exchanged(twins()[:2], 0, 1))
    with pytest.raises(RouteError, match="another sample"):
        check(BundleReader(str(tmp_path)).read(1))
    BundleWriter(str(tmp_path)).write(1, twins()[:2])
    check(BundleReader(str(tmp_path)).read(1))


def test_binding_never_mends_what_is_of_other_tokens() -> None:
    record = make_record()
    assert record.routes is not None
    stale = replace(record, tokens=record.tokens + 1)
    assert stale.bound() is stale
    bound = record.bound()
    assert bound.bound() is bound
    other = replace(bound, sample_id=1)
    assert other.bound() is other
    assert replace(record, routes=None).bound().routes is None
    assert bound.origin == sample_origin(0, record.versions)


def test_all_rows_of_a_sample_are_bound_whatever_its_first_row_is() -> None:
    record = make_record()
    for first in (record, record.bound(), replace(record, routes=None)):
        sample = replace(first, further=(replace(record, row=1), replace(record, row=2, routes=None))).bound()
        assert sample.routes == first.bound().routes
        second, third = sample.further
        assert second.routes is not None
        second.routes.check_tokens(second.tokens, second.origin)
        assert second.origin != record.origin
        assert third.routes is None
