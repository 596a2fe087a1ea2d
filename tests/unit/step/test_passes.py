from __future__ import annotations

import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.step.passes import ReplayMode, anchor_source, resolve_mode, update_source
from moe_trm.types import MicroBatch, TrainRow
from routing.replay import Native, Record, Recorded, ReplayRecorded, ReplayRecords
from tests.unit.records import make_record

BATCH = collate(MicroBatch((TrainRow(make_record(), 1.0),)), keep_mask=True)
RECORDED = Recorded({0: torch.zeros(8, 2, dtype=torch.int64)})


def test_the_table_of_replay_modes() -> None:
    assert anchor_source("none", BATCH) == Native()
    assert update_source("none", BATCH, None) == Native()
    assert anchor_source("R2", BATCH) == Record()
    assert update_source("R2", BATCH, RECORDED) == ReplayRecorded(RECORDED)
    assert anchor_source("R3", BATCH) == ReplayRecords(BATCH.routes)
    assert update_source("R3", BATCH, None) == ReplayRecords(BATCH.routes)


def test_r2_without_a_recording_is_a_bug_of_ours_and_stops() -> None:
    with pytest.raises(AssertionError, match="R2"):
        update_source("R2", BATCH, None)


@pytest.mark.parametrize(
    ("minibatches", "max_age", "expected"),
    [(1, 0, "none"), (2, 0, "R2"), (3, 0, "R2"), (4, 0, "R3"), (8, 0, "R3"), (1, 1, "R3"), (2, 3, "R3")],
)
def test_auto_follows_off_policiness_and_age(minibatches: int, max_age: int, expected: ReplayMode) -> None:
    mode, why = resolve_mode("auto", minibatches=minibatches, max_age=max_age)
    assert mode == expected
    assert str(max_age or minibatches) in why or minibatches == 1


def test_a_configured_mode_is_kept() -> None:
    assert resolve_mode("R2", minibatches=8, max_age=4)[0] == "R2"
