"""A small complete run on a GPU that SGLang and a learner share; the CUDA engine's own hash proves the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.job import run_job
from moe_trm.models.tiny.checkpoint import TinyShape
from moe_trm.tools.quickstart.warmup import warm_up
from tests.integration.jobs import BRIEF, STEPS, metrics_of, write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("learner", ["megatron", "deepspeed"])
def test_replay_is_proved_and_weights_are_verified_on_cuda(tmp_path: Path, dtype: str, learner: str) -> None:
    warm_up(tmp_path / "checkpoint", recipe=BRIEF, shape=TinyShape(head_dim=64))
    config = write_config(tmp_path, tmp_path / "checkpoint")
    overrides = [
        f"learner.backend={learner}",
        f"learner.dtype={dtype}",
        "learner.parallel.expert=1",
        "rollout.server.device=cuda",
    ]
    overrides += ["rollout.server.extra_args=[--mem-fraction-static, '0.3']"]
    assert run_job(str(config), overrides) == 0
    for row in metrics_of(tmp_path / "runs" / "live")[1 : STEPS + 1]:
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["ledger/trained"] == row["ledger/issued"]
