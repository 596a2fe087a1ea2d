"""Samples of several rows in a bundle: written, read, given back whole, and refused where a run cannot take them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import BundleError
from moe_trm.recording.bundle import BundleReader, BundleWriter, joined
from moe_trm.rollout.build import build_engine
from moe_trm.rollout.recorded import BundleEngine
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from routing.layout.row_ids import ROW_STEP
from tests.unit.recording.test_bundle import assert_same
from tests.unit.records import make_record, split_record
from tests.unit.rollout.agents.made_sessions import rows_of, sample_of, tree_of

FORKED = [-1, 0, 1, 0, -1]
SESSION = sample_of(FORKED, "trajectory", sample_id=0, group_id=0, reward=0.5)
MASKED = split_record(make_record(sample_id=1, group_id=0, num_sampled=6).bound(), [1, 2, 3])
SINGLE = make_record(sample_id=2, group_id=1).bound()


def test_rows_come_back_as_they_were_with_their_tree(tmp_path: Path) -> None:
    BundleWriter(str(tmp_path)).write(1, [SESSION, MASKED, SINGLE], {3: "rollout_crash"})
    reader = BundleReader(str(tmp_path))
    rows = reader.read(1)
    assert [(row.sample_id, row.row) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    for written, read in zip([*SESSION.rows, *MASKED.rows, *SINGLE.rows], rows, strict=True):
        assert_same(written, read)
    assert rows[1].session == SESSION.session != ()
    for written, (number, read) in zip([SESSION, MASKED, SINGLE], joined(rows).items(), strict=True):
        assert written.sample_id == number
        assert_same(written, read)
    assert reader.header(1).rejected == {3: "rollout_crash"}
    logprobs = reader.logprobs(1)
    assert sorted(logprobs) == [0, 1, 2, ROW_STEP, ROW_STEP + 1, 2 * ROW_STEP, 2 * ROW_STEP + 1]
    assert np.array_equal(logprobs[ROW_STEP + 1], MASKED.rows[1].rollout_logprobs)


def test_routes_that_rows_share_are_stored_once(tmp_path: Path) -> None:
    """Ten rows with one history are hardly larger than the last of them alone."""
    whole = make_record(sample_id=0, num_prompt=400, num_sampled=20).bound()
    sizes = {}
    for name, sample in (("one", whole), ("ten", split_record(whole, [2] * 10))):
        BundleWriter(str(tmp_path / name)).write(1, [sample])
        sizes[name] = len(BundleReader(str(tmp_path / name)).read(1)), route_bytes(tmp_path / name)
    assert (sizes["one"][0], sizes["ten"][0]) == (1, 10)
    assert sizes["ten"][1] < 1.5 * sizes["one"][1]


def route_bytes(folder: Path) -> int:
    from safetensors.numpy import load_file

    return int(load_file(folder / "step-000001.safetensors")["routes"].nbytes)


def given(folder: Path, sample_id: int, *, several_rows: bool, version: int = 9) -> RolloutRecord:
    async def run() -> RolloutRecord:
        engine = BundleEngine(str(folder), prompts_own=True, several_rows=several_rows)
        await engine.start()
        await engine.load_weights(WeightPush(version, "", ()))
        return await engine.generate(Prompt("p", ()), SamplingParams(), sample_id=sample_id, group_id=1)

    return asyncio.run(run())


def test_a_repeated_run_gets_the_sample_whole_or_is_told_why_not(tmp_path: Path) -> None:
    sample = rows_of(tree_of(FORKED), "turns").sample
    BundleWriter(str(tmp_path)).write(1, [sample])
    assert_same(given(tmp_path, 5, several_rows=True), sample)
    with pytest.raises(BundleError, match="several rows of one sample") as refused:
        given(tmp_path, 5, several_rows=False)
    assert "agent.rows" in str(refused.value)
    # Answer 4 is of version 4: a run that is not there yet cannot have it, whichever row it is in.
    with pytest.raises(BundleError, match="ahead of this run"):
        given(tmp_path, 5, several_rows=True, version=3)


@pytest.mark.parametrize(("rows", "several"), [("last", False), ("turns", True)])
def test_the_setting_says_what_a_repeated_run_takes(tmp_path: Path, rows: str, several: bool) -> None:
    engine = build_engine(
        Config.model_validate(
            {
                "model": {"checkpoint": "none"},
                "rollout": {"agent": "a.py:run", "engine": "bundle", "bundle": str(tmp_path)},
                "agent": {"rows": rows},
            }
        ),
        None,
    )
    assert isinstance(engine, BundleEngine)
    assert engine._several_rows is several
