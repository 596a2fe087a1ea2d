"""A whole run on the DeepSpeed learner: another family than Qwen, weights partitioned over the ranks and broadcast into the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.job import run_job
from moe_trm.models.tiny import make_family
from tests.integration.jobs import STEPS, metrics_of, write_config


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sync"), [("olmoe", "distributed"), ("mixtral", "disk"), ("deepseek_v3", "disk")])
def test_a_family_runs_from_samples_to_pushed_weights(tmp_path: Path, hf_models: None, family: str, sync: str) -> None:
    config = write_config(tmp_path, make_family(family, tmp_path / family))
    overrides = ["learner.backend=deepspeed", "learner.parallel.expert=1", "learner.deepspeed.zero_stage=3"]
    # The entropy bonus moves the weights whatever the rewards are.
    overrides += ["rollout.server.dtype=float32", f"sync.method={sync}", "loss.entropy_coef=0.01"]
    assert run_job(str(config), overrides, 2) == 0
    for row in metrics_of(tmp_path / "runs" / "live")[1 : STEPS + 1]:
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["optimizer/grad_norm"] > 0
        assert row["ledger/trained"] == row["ledger/issued"]
        # Also after the push the engine samples from the learner's weights.
        assert row["engine/k3_kl"] < 1e-7
