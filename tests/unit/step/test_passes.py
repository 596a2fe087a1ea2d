from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.step.passes import anchor_source, judging, update_source
from moe_trm.types import MicroBatch, TrainRow
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayRecords
from tests.unit.records import make_record

BATCH = collate(MicroBatch((TrainRow(make_record()),)), keep_mask=True)
RECORDED = Recorded({0: torch.zeros(8, 2, dtype=torch.int64)})


def test_the_table_of_replay_modes() -> None:
    assert anchor_source("none", BATCH) == Native()
    assert update_source("none", BATCH, None) == Native()
    assert anchor_source("R2", BATCH) == Record()
    assert update_source("R2", BATCH, RECORDED) == ReplayRecorded(RECORDED)
    assert anchor_source("R3", BATCH) == ReplayRecords(BATCH.routes, BATCH.origins, prompts=(4,))
    assert update_source("R3", BATCH, None) == ReplayRecords(BATCH.routes, BATCH.origins, prompts=(4,))


def test_r2_without_a_recording_is_a_bug_of_ours_and_stops() -> None:
    with pytest.raises(AssertionError, match="R2"):
        update_source("R2", BATCH, None)


def test_a_row_is_judged_at_the_weights_that_sampled_it() -> None:
    """Rows of version 3, of 2, and of both; the last is padding."""
    batch = replace(BATCH, sampled_by=((3, 3), (2, 2), (2, 3), (-1, -1)))
    assert judging(batch, 3, others=True) == (True, False, None, False)
    assert judging(batch, 2, others=True) == (False, True, False, False)
    assert judging(batch, 3, others=False)[:3] == (True, None, None)
    assert BATCH.sampled_by == ((0, 0),)
