"""A whole run on the DeepSpeed learner: another family than Qwen, partitioned weights broadcast into the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.models.tiny.families import make_family
from tests.integration.jobs import STEPS, metrics_of, run_job, write_config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "sync"),
    [
        ("olmoe", {}, "distributed"),
        ("mixtral", {}, "disk"),
        # As DeepSeek-V2-Lite has it; `benchmarks.models` runs the family with compressed queries.
        ("deepseek_v3", {"q_lora_rank": None}, "disk"),
        ("gpt_oss", {}, "disk"),
    ],
)
def test_a_family_runs_from_samples_to_pushed_weights(
    tmp_path: Path, family: str, options: dict[str, Any], sync: str
) -> None:
    config = write_config(tmp_path, make_family(family, tmp_path / family, **options))
    overrides = ["learner.backend=deepspeed", "learner.parallel.expert=1", "learner.deepspeed.zero_stage=3"]
    # The entropy bonus moves the weights whatever the rewards are.
    overrides += ["rollout.server.dtype=float32", f"sync.method={sync}", "loss.entropy_coef=0.01"]
    assert run_job(config, overrides, 2) == 0
    for row in metrics_of(tmp_path / "runs" / "live")[1 : STEPS + 1]:
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["optimizer/grad_norm"] > 0
        assert row["ledger/trained"] == row["ledger/issued"]
        # Also after the push the engine samples from the learner's weights.
        assert row["engine/k3_kl"] < 1e-7
