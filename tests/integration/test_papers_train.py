"""Two steps with every line of settings of docs/papers.md: real learner, rollouts recorded from the real server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper_table import REPOSITORY, rows
from moe_trm.config import resolve
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.types import RolloutRecord
from routing import token_digest
from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.objective_support.cases import REWARD

SAMPLES, RECORDED, STEPS = 16, 4, 2
"""Samples of a step, and steps of the recording: some groups are spare, for settings that drop and refill."""
SIZES = [
    "task.max_digits=1",
    "task.eval_size=0",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "learner.parallel={}",
    "learner.micro_batch_rows=8",
    "learner.micro_batch_tokens=null",
    "optimizer.warmup_steps=0",
    "checkpoint.every=0",
    "train.eval_every=0",
    "train.export=false",
    f"train.steps={STEPS}",
]
LINES = {(method.base, method.run): method.name for _, method in reversed(rows()) if method.run is not None}
"""The name of the first row of each line of settings, by its file and settings."""


def stale(record: RolloutRecord) -> RolloutRecord:
    """The record as if it had been sampled one version earlier."""
    assert record.routes is not None
    unbound = replace(record.routes, token_digest=token_digest(record.tokens))
    return replace(record, versions=np.maximum(record.versions - 1, 0), routes=unbound).bound()


@pytest.fixture(scope="module")
def recording(
    tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path, attached: list[str]
) -> Callable[[int, bool], Path]:
    """Makes the bundle of groups of that size, of stale samples or not; each of them once."""
    folder = tmp_path_factory.mktemp("papers")
    config = write_config(folder, brief_checkpoint)

    @cache
    def fresh(group_size: int) -> Path:
        bundle = folder / f"groups-of-{group_size}"
        sizes = [f"rollout.group_size={group_size}", f"rollout.prompts_per_step={SAMPLES // group_size}"]
        # Of one sample there is no group to compare.
        sizes += ["learner.parallel.expert=1", *(["advantage.name=reinforce_plus_plus"] if group_size == 1 else [])]
        run = [f"name={bundle.name}", f"train.steps={RECORDED}", f"record.bundle={bundle}", "probe.every=0"]
        assert run_job(config, [*attached, *REWARD, *sizes, *run, "probe.save=false"], 1) == 0
        return bundle

    @cache
    def made(group_size: int, old: bool) -> Path:
        if not old:
            return fresh(group_size)
        reader = BundleReader(str(fresh(group_size)))
        writer = BundleWriter(str(folder / f"old-groups-of-{group_size}"))
        for step in reader.steps():
            writer.write(step, [stale(record) for record in reader.read(step)])
        return folder / f"old-groups-of-{group_size}"

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("base", "settings"), LINES, ids=LINES.values())
def test_two_steps(
    base: str,
    settings: Sequence[str],
    recording: Callable[[int, bool], Path],
    brief_checkpoint: Path,
    tmp_path: Path,
) -> None:
    path = str(REPOSITORY / base)
    config = resolve(path, [*SIZES, "rollout.prompts_per_step=4", *settings]).config
    group_size, old = config.rollout.group_size, config.pipeline.staleness_limit > 0
    overrides = [
        *SIZES,
        *REWARD,
        *settings,
        f"rollout.prompts_per_step={SAMPLES // group_size}",
        "rollout.engine=bundle",
        f"rollout.bundle={recording(group_size, old)}",
        f"model.checkpoint={brief_checkpoint}",
        f"run_dir={tmp_path}",
        "name=two",
    ]
    assert run_job(path, overrides, 1) == 0
    trained = [row for row in metrics_of(tmp_path / "two") if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2]
    for row in trained:
        assert math.isfinite(row["optimizer/grad_norm"])
        assert row["ledger/trained"] > 0
    assert any(row["optimizer/grad_norm"] > 0 and row["correction/kept_fraction"] > 0 for row in trained)
    if old:
        assert trained[-1]["rollout/age_max"] == 1
