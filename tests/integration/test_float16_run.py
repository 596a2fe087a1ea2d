"""A float16 run on both sides, with the real engines: proofs, verified pushes, the loss scale as metric and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import metrics_of, run_job, write_config

pytestmark = pytest.mark.slow
START = 2**30
FLOAT16 = [
    "rollout.server.dtype=float16",
    "learner.dtype=float16",
    f"learner.loss_scale.initial={START}",
    "loss.entropy_coef=0.1",  # a gradient at every step, whatever the rewards are
]


def test_float16_on_both_sides(tmp_path: Path, brief_checkpoint: Path) -> None:
    """A scale that overflows at first.

    Its updates are skipped and counted, every sample is accounted for, and a resumed run goes on with the scale.
    """
    config = write_config(tmp_path, brief_checkpoint)
    words = [*FLOAT16, "checkpoint.every=1"]
    assert run_job(config, [*words, "train.steps=2"]) == 0
    assert run_job(config, [*words, "train.steps=4", "checkpoint.allow_changes=true"]) == 0
    rows = metrics_of(tmp_path / "runs" / "live")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["replay/applied_fraction"] == 1.0
        assert row["weights/version"] == row["step"]
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places)
        # bfloat16 leaves about 1e-4.
        assert row["engine/k3_kl"] < 2e-5
    scales = [row["optimizer/loss_scale"] for row in rows]
    assert rows[0]["optimizer/skipped"] == 2.0
    assert scales[0] == START / 2
    assert scales == sorted(scales, reverse=True)
    assert scales[2] <= scales[1] / 2 or rows[2]["optimizer/skipped"] < 2.0
