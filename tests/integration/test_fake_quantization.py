"""Pushes of fake-quantised weights to a real server: proved, replayed, and named by the probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.objective_support.cases import REWARD

FORMATS = {"megatron": "int8", "deepspeed": "int4"}


def rounded_run(
    backend: str, name: str, folder: Path, checkpoint: Path, attached: list[str], *own: str
) -> list[dict[str, float]]:
    """Two steps on rounded weights."""
    overrides = [
        f"name={name}",
        f"learner.backend={backend}",
        "learner.parallel.expert=1",
        f"rollout.fake_quantization={FORMATS[backend]}",
        "replay.mode=R3",
        "probe.every=1",
        *REWARD,
        *attached,
        *own,
    ]
    assert run_job(write_config(folder, checkpoint), overrides) == 0
    rows = metrics_of(folder / "runs" / name)[1:]
    assert rows
    return rows


@pytest.fixture(scope="module", params=["megatron", pytest.param("deepspeed", marks=pytest.mark.slow)])
def exact(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    brief_checkpoint: Path,
    attached: list[str],
) -> tuple[str, list[dict[str, float]]]:
    """A learner, and a run of it whose passes compute in exact weights; pushes are proved."""
    folder = tmp_path_factory.mktemp("exact")
    rows = rounded_run(request.param, "exact", folder, brief_checkpoint, attached, "sync.verify=true")
    return request.param, rows


@pytest.mark.long
def test_the_probe_finds_the_share_of_quantisation(exact: tuple[str, list[dict[str, float]]]) -> None:
    """Both engines compute in float32, so that the rounding of the weights is all there is."""
    for row in exact[1]:
        assert row["probe/quantization_k3_kl"] > 1e-6
        assert row["probe/quantization_k3_kl"] == pytest.approx(row["probe/replayed_k3_kl"], rel=0.02)
        assert row["probe/arithmetic_k3_kl"] < row["probe/quantization_k3_kl"] / 1000
        assert "probe/cast_k3_kl" not in row
        assert row["replay/applied_fraction"] == 1.0


@pytest.mark.long
def test_a_learner_that_rounds_like_the_rollout_has_no_mismatch_left(
    exact: tuple[str, list[dict[str, float]]], tmp_path: Path, brief_checkpoint: Path, attached: list[str]
) -> None:
    """With rounded passes what was quantisation is gone, and updates still act."""
    backend, before = exact
    found = rounded_run(backend, "rounded", tmp_path, brief_checkpoint, attached, "learner.round_like_rollout=true")
    for row, rounded in zip(before, found, strict=True):
        assert row["engine/k3_kl"] > 1e-6
        assert rounded["engine/k3_kl"] < row["engine/k3_kl"] / 1000
        assert "probe/quantization_k3_kl" not in rounded
        assert rounded["update/first_nonzero_fraction"] == 0
        assert rounded["optimizer/grad_norm"] > 0
        assert rounded["replay/applied_fraction"] == 1.0


@pytest.mark.long
def test_noise_on_norms_reaches_the_server_and_only_from_its_first_stage_on(
    tmp_path: Path, brief_checkpoint: Path, attached: list[str]
) -> None:
    """Of two steps the first is sampled without noise; both pushes are proved by the engine's checksums."""
    overrides = [
        "name=noisy",
        "learner.parallel.expert=1",
        "rollout.norm_noise=0.05",
        "rollout.norm_noise_stages=1",
        "sync.verify=true",
        "replay.mode=R3",
        "probe.every=1",
        *attached,
    ]
    assert run_job(write_config(tmp_path, brief_checkpoint), overrides) == 0
    first, second = metrics_of(tmp_path / "runs" / "noisy")[1:]
    assert first["engine/k3_kl"] < 1e-9
    assert second["engine/k3_kl"] > 1e-6
    assert second["replay/applied_fraction"] == 1.0
