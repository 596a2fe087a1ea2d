"""Exact runs on real SGLang servers and Megatron-Core: zero in every step, and a last bit ends the run by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.last_bit import LAYER, planted
from launch import job
from moe_trm.models.tiny.families import make_family
from tests.integration.jobs import metrics_of, run_job, write_config

pytest.importorskip("moe_trm_sglang_cpu.fixed_order", reason="CPU support is installed on machines without CUDA only")

pytestmark = pytest.mark.slow

EXACT = [
    "exact=true",
    "rollout.server.port=0",
    "rollout.server.dtype=float32",
    "rollout.server.startup_timeout_s=1200",
    "task.reward=benchmarks.even_ids:share",
    "rollout.top_p=1",
    "replay.mode=R3",
    "sync.prove_every=1",
    "learner.parallel.expert=1",
    "learner.minibatches=2",
    "train.steps=3",
    "optimizer.lr=1e-3",
]


RULES = "correction.rules=[{name: trm_max, thresholds: {max_kl: 0.5}}, {name: token_tis}]"


@pytest.mark.parametrize(
    ("family", "ranks", "more"),
    [("qwen3_moe", 1, []), ("glm4_moe", 1, []), ("qwen3_moe", 2, [RULES, "loss.name=gspo"])],
    ids=["qwen3_moe", "glm4_moe", "two ranks with rules"],
)
def test_every_step_is_zero(family: str, ranks: int, more: list[str], tmp_path: Path) -> None:
    """Four experts per token: the order of their sum matters."""
    checkpoint = make_family(family, tmp_path / "checkpoint", num_experts_per_tok=4)
    assert run_job(write_config(tmp_path, checkpoint), [*EXACT, *more], ranks) == 0
    rows = [row for row in metrics_of(tmp_path / "runs" / "live") if row["step"]]
    assert len(rows) == 3
    for row in rows:
        assert row["engine/k3_kl"] == 0  # flips end the run, too; the rate counts updates, whose weights have moved
        assert row["weights/decode_gap"] == row["weights/learner_gap"] == 0
        assert row["optimizer/grad_norm"] > 0


def test_a_last_bit_in_one_layer_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in planted(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    checkpoint = make_family("qwen3_moe", tmp_path / "checkpoint")
    # By torchrun: a rank that is forked has the environment of the fork server, and the second server is the rank's.
    assert job.run_job(str(write_config(tmp_path, checkpoint)), [*EXACT, "sync.prove_every=0"], 1) != 0
    told = "".join(capfd.readouterr())
    assert f"differ in an exact run: layer {LAYER}: attention differs first" in told
    assert not [row for row in metrics_of(tmp_path / "runs" / "live") if row["step"]], "nothing was trained"
