"""Whole runs on the real engines: SGLang samples in bfloat16, two Megatron ranks replay and train; then a repeat."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.job import free_port
from moe_trm.cli import main as moe_trm
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.recording.scores import ScoresReader
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.types import RolloutRecord
from routing import RouteRecord, token_digest
from tests.integration.jobs import STEPS, metrics_of, timeless, write_config
from tests.integration.jobs import run_job as run_forked
from tests.unit.observe.report.page_reader import PageReader

REWARD = f"{Path(__file__).parent / 'objective_support' / 'reward.py'}:reward"
KEY = "a-key-for-both-halves-5c1d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end-to-end")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    return write_config(folder, brief_checkpoint)


@pytest.fixture(scope="module")
def live(folder: Path, config: Path) -> Path:
    """A run on the real server with two learner ranks, evaluated after every step, and recorded into a bundle.

    Its two halves are started by hand, as the README does: `launch.rollout`, and torchrun with `launch.train`. Its
    reward tells answers apart that are not yet right, so that every step has something to learn.
    """
    overrides = [str(config), f"rollout.server.port={free_port()}"]
    settings = [f"record.bundle={folder / 'bundle'}", "train.eval_every=1", "eval.samples=2", f"task.reward={REWARD}"]
    environment = {**os.environ, API_KEY_VARIABLE: KEY}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    server = subprocess.Popen(
        [sys.executable, "-m", "launch.rollout", *overrides], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert any("ready at" in line for line in server.stdout)
        train = [*torchrun, "-m", "launch.train", *overrides, *settings, "train.export=true"]
        subprocess.run(train, env=environment, check=True, timeout=400)
    finally:
        server.terminate()
        assert server.wait(120) == 0
        server.stdout.close()
    return folder / "runs" / "live"


def from_bundle(config: Path, name: str, bundle: Path, *overrides: str) -> int:
    settings = [f"name={name}", "rollout.engine=bundle", f"rollout.bundle={bundle}", f"task.reward={REWARD}"]
    return run_forked(config, [*settings, *overrides])


def test_every_promised_metric_is_in_every_step(live: Path) -> None:
    rows = metrics_of(live)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert "eval/reward" in rows[0]
    assert "eval/reward" in rows[-1]
    promised = {
        *("reward/mean", "response/length_mean", "replay/applied_fraction", "routing/local_flip_rate"),
        *("routing/native_flip_rate", "engine/k3_kl", "staleness/k3_kl", "total/k3_kl"),
        *("routing/flips/engine", "routing/flips/engine/layer_0", "routing/flips/engine/position_1_64"),
        *("correction/kept_fraction", "correction/trm_max/kept_fraction", "correction/icepop/kept_fraction"),
        *("loss/pg_clipfrac", "optimizer/grad_norm", "weights/version", "ledger/rejected", "ledger/issued"),
        *("total/exact_kl", "correction/trm_max/only_exact_keeps", "correction/trm_max/only_sampled_keeps"),
        *("sampling_mask/size_median", "sampling_mask/size_p99", "sampling_mask/singleton_fraction"),
        *("sampling_mask/violations", "sampling_mask/bytes_per_token", "sampling_mask/learner_kept_mass_mean"),
        *("time/step_s", "time/rollout_s", "time/score_s", "time/update_s", "time/sync_s"),
        *("variance/total_power", "variance/signal_strength", "variance/pure_noise", "reward/explained_variance"),
        *("engine/probs_diff_p95", "total/chi2_token_p95", "total/training_log_ppl", "total/log_ppl_diff_max"),
    }
    for row in rows[1:]:
        assert promised <= row.keys(), promised - row.keys()
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["weights/version"] == row["step"]
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places) == 16 * row["step"]
        assert 0 < row["engine/probs_diff_p95"] <= row["engine/probs_diff_max"] * 1.5
        signal, power = row["variance/signal_strength"], row["variance/total_power"]
        assert signal == pytest.approx(row["optimizer/grad_norm"] ** 2)
        rows_of_update = 16 / row["optimizer/steps"]
        assert row["variance/pure_noise"] == pytest.approx(max(0.0, (power - signal) / (rows_of_update - 1)))


def test_the_first_update_of_a_synchronous_step_is_bitwise_the_behaviour_pass(live: Path) -> None:
    assert [row["update/first_nonzero_fraction"] for row in metrics_of(live)[1:]] == [0.0] * STEPS


def test_replayed_routes_are_the_rollouts_and_flip_locally_only_a_little(live: Path) -> None:
    for row in metrics_of(live)[1:]:
        # Some 1,400 token-layers in bfloat16 flip ten times, or never.
        assert 0 <= row["routing/local_flip_rate"] < 0.2
        assert row["probe/replayed_k3_kl"] == pytest.approx(row["engine/k3_kl"], rel=0.5)


def test_the_cast_of_the_weights_has_its_share_of_the_numerics(live: Path) -> None:
    """float32 weights are pushed to a bfloat16 engine."""
    for row in metrics_of(live)[1:]:
        assert 0 < row["probe/cast_k3_kl"] < 4 * row["probe/replayed_k3_kl"]
        assert 0 < row["probe/arithmetic_k3_kl"] < 4 * row["probe/replayed_k3_kl"]


@pytest.mark.slow
def test_a_recorded_run_repeats_bit_for_bit(live: Path, folder: Path, config: Path) -> None:
    """The bundle gives the recorded rollouts back; the rest is computed anew, twice, and must be the same."""
    assert from_bundle(config, "again", folder / "bundle") == 0
    recorded, again = timeless(metrics_of(live)), timeless(metrics_of(folder / "runs" / "again"))
    for one, two in zip(recorded[1:], again[1:], strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("eval/")} == {
            k: v for k, v in two.items() if not k.startswith("eval/")
        }


def test_evaluations_measure_greedy_and_sampled_answers(live: Path) -> None:
    for row in metrics_of(live):
        assert row["eval/prompts"] == 16
        assert 0 <= row["eval/avg_at_2"] <= row["eval/best_at_2"] <= 1
        assert 0 <= row["eval/reward"] <= row["eval/finished_fraction"] <= 1


@pytest.mark.long
def test_the_reference_is_the_start_checkpoint(live: Path, folder: Path, config: Path) -> None:
    """Before the first step the policy is the reference, bit for bit.

    The entropy bonus then moves it, whatever the rewards were. The run replays nothing: its probe does, in step 2.
    """
    overrides = ["replay.mode=none", "probe.every=2", "learner.parallel.expert=1", "learner.minibatches=1"]
    pull = ["kl.coef=0.5", "kl.estimator=k3", "loss.entropy_coef=0.1", "optimizer.lr=0.001"]
    assert from_bundle(config, "kl", folder / "bundle", *overrides, *pull) == 0
    _, first, second = metrics_of(folder / "runs" / "kl")
    assert first["engine/k3_kl"] == pytest.approx(metrics_of(live)[1]["probe/native_k3_kl"], rel=1e-3)
    assert first["reference/k1_kl"] == first["reference/k3_kl"] == first["loss/kl"] == 0.0
    assert second["reference/k3_kl"] > 0
    assert second["loss/kl"] == pytest.approx(0.5 * second["reference/k3_kl"], rel=1e-5)
    assert [row["replay/token_layers"] for row in (first, second)] == [0, 0]
    assert not {"replay/applied_fraction", "routing/local_flip_rate"} & {*first, *second}
    assert "probe/applied_fraction" not in first
    assert second["probe/applied_fraction"] == 1.0
    assert 0 <= second["probe/local_flip_rate"] < 0.2


@pytest.mark.slow
def test_kl_in_the_reward_entropy_epochs_and_a_token_budget(live: Path, folder: Path, config: Path) -> None:
    overrides = [
        *("kl.coef=0.1", "kl.where=reward", "kl.controller=adaptive", "loss.entropy_coef=0.01", "learner.epochs=2"),
        *("learner.micro_batch_rows=null", "learner.micro_batch_tokens=128", "batch.layout=padded"),
        "learner.freeze_router=true",
        *("optimizer.schedule=cosine", "optimizer.warmup_steps=0", "train.export=true", "train.steps=1"),
    ]
    assert from_bundle(config, "plumbing", folder / "bundle", *overrides) == 0
    row, usual = metrics_of(folder / "runs" / "plumbing")[1], metrics_of(live)[1]
    assert row["optimizer/steps"] == 4
    assert 0 < row["optimizer/lr"] < 1e-4
    assert row["policy/entropy"] > 0
    assert row["loss/entropy"] == pytest.approx(-0.01 * row["policy/entropy"], rel=0.05)
    assert row["kl/coef"] == 0.1
    assert "loss/kl" not in row
    assert row["loss/policy"] != usual["loss/policy"]
    assert row["update/first_nonzero_fraction"] == 0.0
    assert row["replay/applied_fraction"] == 1.0
    assert row["replay/native_fraction"] == 0.0
    assert row["batch/micro_batches"] > 2
    assert row["reward/mean"] == usual["reward/mean"]


def test_report_and_transcripts_say_what_was_measured(live: Path, folder: Path) -> None:
    """Every number of the pages is that of `metrics.jsonl`, of the recorded rollouts, or of the update's scores."""
    rows = metrics_of(live)
    (told,) = PageReader((live / "report.html").read_text()).data["runs"]
    assert told["metrics"].keys() >= {"reward/mean", "total/k3_kl", "routing/local_flip_rate/layer_0", "time/update_s"}
    for name, series in told["metrics"].items():
        assert series["steps"] == [row["step"] for row in rows if name in row]
        assert series["values"] == [row[name] for row in rows if name in row]
    transcripts = PageReader((live / "transcripts" / "step-000001.html").read_text()).data["rollouts"]
    recorded = {record.sample_id: record for record in BundleReader(str(folder / "bundle")).read(1)}
    behaviour = {
        sample: batch.anchor_logprobs[place] - batch.rollout_logprobs[place]
        for update in ScoresReader(folder / "bundle").read(1)
        for batch in update.batches
        for place, sample in enumerate(batch.sample_ids.tolist())
        if batch.anchor_logprobs is not None
    }
    assert len(transcripts) == 4
    for each in transcripts:
        record = recorded[each["sample_id"]]
        own = np.flatnonzero(record.sampled)
        assert each["ids"] == record.tokens.tolist()
        assert "".join(each["texts"]).startswith("<bos>")
        assert [each["rollout_logprobs"][place] for place in own] == record.rollout_logprobs.tolist()
        assert [each["log_ratio"][place] for place in own] == behaviour[record.sample_id][own - 1].tolist()


@pytest.mark.slow
def test_a_run_ended_by_ctrl_c_leaves_metrics_and_report(live: Path, folder: Path, config: Path) -> None:
    run = folder / "runs" / "interrupted"
    settings = ["name=interrupted", "rollout.engine=bundle", f"rollout.bundle={folder / 'bundle'}"]
    command = [sys.executable, "-m", "moe_trm", "train", str(config), *settings, "learner.parallel.expert=1"]
    job = subprocess.Popen(command, start_new_session=True)
    metrics = run / "metrics.jsonl"
    while job.poll() is None and not (metrics.is_file() and b'"step":1' in metrics.read_bytes()):
        time.sleep(0.02)
    # As a terminal does: to every process of the job at once.
    os.killpg(job.pid, signal.SIGINT)
    job.wait(timeout=300)
    rows = metrics_of(run)
    assert rows[-1]["step"] >= 1
    (told,) = PageReader((run / "report.html").read_text()).data["runs"]
    assert told["metrics"]["reward/mean"]["steps"] == [row["step"] for row in rows if "reward/mean" in row]


@pytest.mark.parametrize(
    ("mode", "replayed_passes"),
    [
        pytest.param("none", 0, marks=pytest.mark.slow),
        pytest.param("R2", 1, marks=pytest.mark.long),
        pytest.param("auto", 1, marks=pytest.mark.slow),
    ],
)
def test_other_replay_modes_on_the_same_rollouts(
    live: Path, folder: Path, config: Path, mode: str, replayed_passes: int
) -> None:
    """Two minibatches of fresh samples: `auto` is R2.

    Neither replays in the behaviour pass, and both start every step on-policy.
    """
    overrides = [f"replay.mode={mode}", "learner.parallel.expert=1", "train.steps=1"]
    assert from_bundle(config, f"mode-{mode}", folder / "bundle", *overrides) == 0
    row, r3 = metrics_of(folder / "runs" / f"mode-{mode}")[1], metrics_of(live)[1]
    assert row["update/first_nonzero_fraction"] == 0.0
    assert row["probe/applied_fraction"] == r3["probe/applied_fraction"] == 1.0
    assert row.get("replay/applied_fraction") == (1.0 if replayed_passes else None)
    # R3 replays the behaviour pass and the updates, R2 the updates, and none nothing. The probe's passes do not count.
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
    [
        (shift_rows, "misaligned"),
        pytest.param(swap_layers, "misaligned", marks=pytest.mark.slow),
        pytest.param(stale, "routes belong to other tokens", marks=pytest.mark.slow),
    ],
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


def test_both_halves_leave_everything_that_a_run_has_and_no_key(live: Path) -> None:
    exported = live / "checkpoints" / "final"
    assert (exported / "config.json").is_file()
    assert (exported / "tokenizer.json").is_file()
    written = [path for path in live.rglob("*") if path.is_file()]
    assert {"config.json", "rollout.log", "metrics.jsonl", "controller.log"} <= {path.name for path in written}
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def judged(bundle: Path, *arguments: str) -> list[dict[str, Any]]:
    """The output of `moe-trm whatif` on a bundle, candidate by candidate."""
    out = bundle / "whatif.json"
    assert moe_trm(["whatif", str(bundle), "--json", str(out), *arguments]) == 0
    candidates: list[dict[str, Any]] = json.loads(out.read_text())["candidates"]
    return candidates


def assert_same_metrics(offline: dict[str, Any], logged: dict[str, Any]) -> None:
    """Everything the objective computes comes out again.

    The kept tokens are the same; other sums are taken in another order. A recording has no gradient norms, so its
    verdict claims less.
    """
    assert "correction/kept_fraction" in offline
    for name, value in offline.items():
        if name == "verdict":
            assert logged[name].startswith(value.removesuffix("."))
            continue
        exact = isinstance(value, str) or name.endswith(("kept_fraction", "kept_sequence_fraction"))
        assert logged[name] == (value if exact else pytest.approx(value, rel=1e-9, abs=1e-12)), name


@pytest.mark.long
def test_whatif_says_what_training_logged_and_what_another_rule_would_have(
    live: Path, folder: Path, config: Path
) -> None:
    tight = "{name: icepop, thresholds: {low: 0.999, high: 1.001}}"
    own, other = judged(folder / "bundle", "--rules", f"[{tight}]")
    rows = metrics_of(live)
    for step in range(1, STEPS + 1):
        assert_same_metrics(own["steps"][str(step)], rows[step])
    assert str(rows[-1]["verdict"]).startswith(own["verdict"].removesuffix("."))
    assert sum(own["histogram"].values()) == pytest.approx(1.0)

    rules = f"[{tight}, {{name: m2po}}, {{name: trm_max, target_reject_rate: 0.2}}]"
    settings = [f"correction.rules={rules}", "correction.calibration_steps=1", "correction.batch_normalize=token"]
    second = folder / "second-bundle"
    assert from_bundle(config, "second", folder / "bundle", *settings, f"record.bundle={second}") == 0
    trained = metrics_of(folder / "runs" / "second")
    name = "correction/icepop/kept_fraction"
    assert 0 < other["steps"]["1"][name] < 1
    assert other["steps"]["1"][name] == trained[1][name]
    again = judged(second, "--loss", "gspo", "oapl")[0]
    for step in range(1, STEPS + 1):
        assert_same_metrics(again["steps"][str(step)], trained[step])
    assert "correction/trm_max/threshold_max_kl" in again["steps"]["1"]
