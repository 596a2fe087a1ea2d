"""Whole runs on the real engines: SGLang samples in bfloat16, two Megatron ranks replay and train; then the recorded run repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.job import free_port, run_job
from moe_trm.rollout.bundle import BundleReader, BundleWriter
from moe_trm.types import RolloutRecord
from routing import RouteRecord, token_digest
from tests.integration.jobs import STEPS, metrics_of, timeless, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end-to-end")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    return write_config(folder, brief_checkpoint)


@pytest.fixture(scope="module")
def live(folder: Path, config: Path) -> Path:
    """A run on the real server with two learner ranks, recorded into a bundle."""
    assert run_job(str(config), [f"record.bundle={folder / 'bundle'}"]) == 0
    return folder / "runs" / "live"


def from_bundle(config: Path, name: str, bundle: Path, *overrides: str) -> int:
    return run_job(str(config), [f"name={name}", "rollout.engine=bundle", f"rollout.bundle={bundle}", *overrides])


def test_every_promised_metric_is_in_every_step(live: Path) -> None:
    rows = metrics_of(live)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert "eval/accuracy" in rows[0]
    assert "eval/accuracy" in rows[-1]
    promised = {
        *("reward/mean", "response/length_mean", "replay/applied_fraction", "routing/local_flip_rate"),
        *("routing/native_flip_rate", "engine/k3_kl", "staleness/k3_kl", "total/k3_kl"),
        *("correction/kept_fraction", "correction/trm_max/kept_fraction", "correction/icepop/kept_fraction"),
        *("loss/pg_clipfrac", "optimizer/grad_norm", "weights/version", "ledger/rejected", "ledger/issued"),
        *("total/exact_kl", "correction/trm_max/only_exact_keeps", "correction/trm_max/only_sampled_keeps"),
        *("sampling_mask/size_median", "sampling_mask/size_p99", "sampling_mask/singleton_fraction"),
        *("sampling_mask/violations", "sampling_mask/bytes_per_token", "sampling_mask/learner_kept_mass_mean"),
        *("time/step_s", "time/rollout_s", "time/score_s", "time/update_s", "time/sync_s"),
    }
    for row in rows[1:]:
        assert promised <= row.keys(), promised - row.keys()
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["weights/version"] == row["step"]
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places) == 16 * row["step"]


def test_the_first_update_of_a_synchronous_step_is_bitwise_the_behaviour_pass(live: Path) -> None:
    assert [row["update/first_nonzero_fraction"] for row in metrics_of(live)[1:]] == [0.0] * STEPS


def test_replayed_routes_are_the_rollouts_and_flip_locally_only_a_little(live: Path) -> None:
    for row in metrics_of(live)[1:]:
        assert 0 < row["routing/local_flip_rate"] < 0.2
        assert row["probe/replayed_k3_kl"] == pytest.approx(row["engine/k3_kl"], rel=0.5)


def test_a_recorded_run_repeats_bit_for_bit(live: Path, folder: Path, config: Path) -> None:
    """The bundle gives the recorded rollouts back; everything after them is computed anew, twice, and must be the same."""
    assert from_bundle(config, "again", folder / "bundle") == 0
    recorded, again = timeless(metrics_of(live)), timeless(metrics_of(folder / "runs" / "again"))
    for one, two in zip(recorded[1:], again[1:], strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("eval/")} == {
            k: v for k, v in two.items() if not k.startswith("eval/")
        }


@pytest.mark.parametrize(("mode", "replayed_passes"), [("none", 1), ("R2", 2), ("auto", 2)])
def test_other_replay_modes_on_the_same_rollouts(
    live: Path, folder: Path, config: Path, mode: str, replayed_passes: int
) -> None:
    """Two minibatches of fresh samples: `auto` is R2. Neither replays in the behaviour pass, and both start every step on-policy."""
    overrides = [f"replay.mode={mode}", "learner.parallel.expert=1", "train.steps=1"]
    assert from_bundle(config, f"mode-{mode}", folder / "bundle", *overrides) == 0
    row, r3 = metrics_of(folder / "runs" / f"mode-{mode}")[1], metrics_of(live)[1]
    assert row["update/first_nonzero_fraction"] == 0.0
    assert row["replay/applied_fraction"] == 1.0
    # R3 replays the behaviour pass and the updates; R2 the updates and the probe's pass; none the probe's pass alone.
    assert row["replay/token_layers"] == replayed_passes * r3["replay/token_layers"] / 2
    assert row["engine/k3_kl"] == pytest.approx(r3["probe/native_k3_kl"], rel=1e-3)
    assert row["probe/replayed_k3_kl"] == pytest.approx(r3["engine/k3_kl"], rel=1e-3)


def shift_rows(record: RolloutRecord) -> RolloutRecord:
    routes = with_routes(record)
    return replace(record, routes=replace(routes, experts=np.roll(routes.experts, 1, axis=0)))


def swap_layers(record: RolloutRecord) -> RolloutRecord:
    routes = with_routes(record)
    return replace(record, routes=replace(routes, experts=np.ascontiguousarray(routes.experts[:, [1, 0, 3, 2]])))


def stale(record: RolloutRecord) -> RolloutRecord:
    return replace(record, routes=replace(with_routes(record), token_digest=token_digest(record.tokens + 1)))


def with_routes(record: RolloutRecord) -> RouteRecord:
    assert record.routes is not None
    return record.routes


@pytest.mark.parametrize(
    ("mutate", "said"),
    [(shift_rows, "misaligned"), (swap_layers, "misaligned"), (stale, "routes belong to other tokens")],
)
def test_wrong_routes_stop_the_run_before_anything_is_trained(
    live: Path,
    folder: Path,
    config: Path,
    mutate: Callable[[RolloutRecord], RolloutRecord],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bundle = folder / f"bundle-{mutate.__name__}"
    writer = BundleWriter(str(bundle))
    writer.write(1, [mutate(record) for record in BundleReader(str(folder / "bundle")).read(1)])
    name = f"broken-{mutate.__name__}"
    assert from_bundle(config, name, bundle, "train.steps=1") != 0
    assert said in capfd.readouterr().err
    assert len(metrics_of(folder / "runs" / name)) <= 1
    shutil.rmtree(bundle)


def test_server_and_learner_started_by_hand(folder: Path, config: Path) -> None:
    """The two halves of the README: `python -m launch.rollout` and `torchrun -m launch.train`, here on one rank without replay."""
    port = free_port()
    overrides = [f"rollout.server.port={port}", "replay.mode=none", "probe.every=0", "learner.parallel.expert=1"]
    environment = {**os.environ, "MOE_TRM_API_KEY": "a key for both"}
    rollout = [sys.executable, "-m", "launch.rollout", str(config), *overrides, "name=by-hand"]
    train = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    train += ["-m", "launch.train", str(config), *overrides, "name=by-hand", "train.steps=1", "train.export=true"]
    server = subprocess.Popen(rollout, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert any("ready at" in line for line in server.stdout)
        subprocess.run(train, env=environment, check=True, timeout=120)
    finally:
        server.terminate()
        assert server.wait(30) == 0
        server.stdout.close()
    run = folder / "runs" / "by-hand"
    row = metrics_of(run)[1]
    assert row["replay/token_layers"] == 0
    assert row["ledger/trained"] == 16
    exported = run / "checkpoints" / "final"
    assert (exported / "config.json").is_file()
    assert (exported / "tokenizer.json").is_file()
    assert "a key for both" not in (run / "config.json").read_text() + (run / "rollout.log").read_text()
