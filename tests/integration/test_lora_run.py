"""Whole runs with adapters of attention, experts and routers on the real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_trm.cli import main as moe_trm
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.files import WEIGHTS
from moe_trm.recording.bundle import BundleReader, BundleWriter
from tests.integration.jobs import metrics_of, run_job, timeless, write_config
from tests.integration.objective_support.cases import REJECTING, REWARD, doctored

ADAPTERS = ["learner.lora={rank: 4, alpha: 8, targets: [attention, experts, router]}", "optimizer.lr=0.005"]
# The entropy bonus moves the weights whatever the rewards are.
ALWAYS = [*ADAPTERS, *REWARD, "loss.entropy_coef=0.05", "probe.every=0", "probe.save=false"]
STEPS = 3
LEARNERS = {
    "megatron": ["learner.parallel.expert=2"],
    "deepspeed": ["learner.backend=deepspeed", "learner.parallel.expert=1", "learner.deepspeed.zero_stage=3"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    return write_config(folder, brief_checkpoint)


def from_bundle(config: Path, name: str, bundle: Path, *overrides: str) -> int:
    settings = [f"name={name}", "rollout.engine=bundle", f"rollout.bundle={bundle}", "rollout.server.dtype=float32"]
    return run_job(config, [*ALWAYS, *settings, *overrides], 2)


class Live(dict[str, Path]):
    """Recorded runs of each learner on the shared server, with a reference; each is made when it is first asked for."""

    def __init__(self, folder: Path, config: Path, attached: list[str]) -> None:
        super().__init__()
        self._folder, self._config, self._attached = folder, config, attached

    def __missing__(self, backend: str) -> Path:
        overrides = [f"name={backend}", f"train.steps={STEPS}", "kl.coef=0.01", "kl.estimator=k3", "train.export=true"]
        # One update a step: in the first one the policy is the reference.
        overrides += ["checkpoint.every=1", f"checkpoint.keep={STEPS}", "learner.minibatches=1"]
        overrides += [f"record.bundle={self._folder / f'bundle-{backend}'}"]
        assert run_job(self._config, [*ALWAYS, *self._attached, *LEARNERS[backend], *overrides], 2) == 0
        self[backend] = self._folder / "runs" / backend
        return self[backend]


@pytest.fixture(scope="module")
def live(folder: Path, config: Path, attached: list[str]) -> Live:
    return Live(folder, config, attached)


@pytest.mark.parametrize("backend", LEARNERS)
def test_the_engine_samples_from_what_the_learner_computes(live: Live, backend: str) -> None:
    """Both are float32: what is left between them is the order of sums. Each push was proved by its checksums."""
    rows = metrics_of(live[backend])[1:]
    assert [row["weights/version"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["replay/applied_fraction"] == 1.0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["optimizer/grad_norm"] > 0
        assert row["engine/k3_kl"] < 1e-6
        assert row["ledger/trained"] == row["ledger/issued"]
    # The reference is scored under its own routes.
    assert rows[0]["reference/k3_kl"] < 1e-10
    assert rows[-1]["reference/k3_kl"] > 1e-5


def exported(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("backend", LEARNERS)
def test_exports_are_the_learners_own_weights_and_an_adapter(
    live: Live, brief_checkpoint: Path, tmp_path: Path, backend: str
) -> None:
    run, start = live[backend], HfCheckpoint(brief_checkpoint)
    assert moe_trm(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert moe_trm(["export", str(run), "--adapter", "--out", str(tmp_path / "adapter")]) == 0
    own, made = exported(run / "checkpoints" / "final"), exported(tmp_path / "hf")
    assert own.keys() == made.keys() == start.names
    factors = load_file(tmp_path / "adapter" / WEIGHTS)
    for name, tensor in own.items():
        torch.testing.assert_close(made[name], tensor, rtol=1e-6, atol=1e-7)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" not in factors:
            assert torch.equal(tensor, start.read(name)), name
            continue
        by_hand = (
            start.read(name).double() + 2.0 * factors[f"{key}B.weight"].double() @ factors[f"{key}A.weight"].double()
        )
        torch.testing.assert_close(tensor.double(), by_hand, rtol=1e-5, atol=1e-6)
        if "experts" not in name:
            assert not torch.equal(tensor, start.read(name)), name


@pytest.mark.parametrize("backend", LEARNERS)
def test_a_resumed_run_repeats_every_bit(live: Live, folder: Path, config: Path, backend: str) -> None:
    settings = [*LEARNERS[backend], "learner.minibatches=1", f"train.steps={STEPS}", "train.export=true"]
    settings += ["kl.coef=0.01", "kl.estimator=k3"]
    begin = f"checkpoint.resume={live[backend] / 'checkpoints' / 'step-000001'}"
    assert from_bundle(config, f"again-{backend}", folder / f"bundle-{backend}", *settings, begin) == 0
    again = folder / "runs" / f"again-{backend}"
    by_step = {row["step"]: row for row in timeless(metrics_of(live[backend]))}
    resumed = [row for row in timeless(metrics_of(again)) if row["step"] > 1]
    assert [row["step"] for row in resumed] == [2, 3]
    for row in resumed:
        for key in ("optimizer/grad_norm", "loss/policy", "engine/k3_kl", "reference/k3_kl"):
            assert row[key] == by_step[row["step"]][key], key
    one, two = (exported(run / "checkpoints" / "final") for run in (live[backend], again))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("change", ["learner.lora.alpha=16", "learner.lora.rank=8", "learner.lora.rank=0"])
def test_a_resumed_run_with_other_adapters_is_refused(
    live: Live, folder: Path, config: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = f"checkpoint.resume={live['megatron'] / 'checkpoints' / 'step-000001'}"
    assert from_bundle(config, "refused", folder / "bundle-megatron", *LEARNERS["megatron"], begin, change) != 0
    assert "another scale" in (said := capfd.readouterr().err) or "does not hold this tensor" in said


@pytest.mark.parametrize("backend", LEARNERS)
def test_corrections_drop_tokens_and_a_lost_sample_is_counted(
    live: Live, folder: Path, config: Path, backend: str
) -> None:
    """The recording of an engine that is off, without one of its samples: the rest trains."""
    out = folder / f"doctored-{backend}"
    assert live["megatron"]
    reader, writer = BundleReader(str(folder / "bundle-megatron")), BundleWriter(str(out))
    for step in reader.steps():
        records = [doctored(record) for record in reader.read(step)]
        writer.write(step, records[1:] if step == 1 else records)
    name = f"doctored-{backend}"
    assert from_bundle(config, name, out, *LEARNERS[backend], REJECTING, "train.steps=2") == 0
    first, second = metrics_of(folder / "runs" / name)[1:]
    assert first["records/rejected/not_recorded"] == first["ledger/rejected"] == 1
    assert first["ledger/trained"] == first["ledger/issued"] - 1
    for row in (first, second):
        assert 0 < row["correction/kept_fraction"] < 1
        assert row["replay/applied_fraction"] == 1.0
        assert row["optimizer/grad_norm"] > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("backend", LEARNERS)
def test_every_replay_mode_and_layout_is_proved(
    live: Live, folder: Path, config: Path, backend: str, mode: str, layout: str
) -> None:
    """Four minibatches of one recording: routes are held, the rollout's or the learner's own.

    Probes make the behaviour pass of the first minibatch, which its update would replace with R3.
    """
    assert live["megatron"]
    name = f"{backend}-{mode}-{layout}"
    settings = [f"replay.mode={mode}", f"batch.layout={layout}", "learner.minibatches=4", "train.steps=2", REJECTING]
    settings += ["probe.every=1"]
    assert from_bundle(config, name, folder / "bundle-megatron", *LEARNERS[backend], *settings) == 0
    rows = metrics_of(folder / "runs" / name)[1:]
    for row in rows:
        assert row["replay/applied_fraction"] == 1.0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["optimizer/grad_norm"] > 0
    # At the second step the recording is of other weights.
    assert rows[0]["engine/k3_kl"] < 1e-4


def test_stale_samples_are_scored_at_the_adapters_that_sampled_them(
    folder: Path, config: Path, attached: list[str]
) -> None:
    """Older policies are held as copies of the factors alone."""
    overrides = ["name=stale", "pipeline.mode=async", "pipeline.max_staleness=1", "train.steps=4", REJECTING]
    overrides += ["batch.layout=auto"]
    assert run_job(config, [*ALWAYS, *attached, *LEARNERS["megatron"], *overrides], 2) == 0
    rows = metrics_of(folder / "runs" / "stale")[1:]
    assert any(row["rollout/age_max"] == 1 for row in rows)
    assert any(row["staleness/k3_kl"] > 1e-8 for row in rows if row["rollout/age_max"] == 1)
    for row in rows:
        assert row["replay/applied_fraction"] == 1.0
        assert row["engine/k3_kl"] < 1e-6
