"""Runs that are killed or interrupted, and go on: real ranks on recorded rollouts."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.short_run import metrics_of
from launch.job import learner_command
from moe_trm.cli import main as moe_trm
from moe_trm.config import load
from moe_trm.errors import REFUSED
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.tools.export.run_folder import RunFolder
from tests.drills.resume_drill import books_balance, kill_everything, run_drill, timeless
from tests.integration.jobs import still_running
from tests.integration.recordings import make_recording
from tests.integration.resume_support import (
    STEPS,
    Job,
    after_step,
    assert_exports_what_the_learner_exported,
    forked,
    start,
)
from tests.integration.resume_support import alone as alone
from tests.integration.resume_support import folder as folder
from tests.integration.test_plain_transformers import PROGRAM as LOAD_AND_GENERATE


@pytest.mark.long
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(folder: Path, alone: Path, tmp_path: Path) -> None:
    drill = run_drill(
        str(folder / "config.yaml"), [], str(folder / "bundle"), tmp_path, ranks=2, kills=1, seed=3, undisturbed=alone
    )
    assert drill.kills == 1
    assert drill.identical
    assert drill.balanced


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_more_often(folder: Path, tmp_path: Path, ranks: int) -> None:
    drill = run_drill(str(folder / "config.yaml"), [], str(folder / "bundle"), tmp_path, ranks=ranks, kills=6, seed=4)
    assert drill.identical
    assert drill.balanced


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_on_deepspeed(folder: Path, tmp_path: Path, stage: int) -> None:
    learner = ["learner.parallel.expert=1", "learner.backend=deepspeed", f"learner.deepspeed.zero_stage={stage}"]
    drill = run_drill(str(folder / "config.yaml"), learner, str(folder / "bundle"), tmp_path, ranks=2, kills=2, seed=5)
    assert drill.kills == 2
    assert drill.identical
    assert drill.balanced


TIMING = ("ledger/", "queue/")
"""Metrics that say how far ahead sampling happened to be."""


@pytest.mark.parametrize(
    ("ranks", "learner"),
    [
        pytest.param(1, ["learner.parallel.expert=1"], marks=pytest.mark.slow),
        pytest.param(2, ["learner.parallel.expert=2"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["learner.parallel.expert=1", "learner.backend=deepspeed", "learner.deepspeed.zero_stage=3"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["megatron", "megatron-experts-on-2", "deepspeed-stage-3"],
)
def test_killed_while_sampling_is_ahead_it_still_has_the_weights_that_sampled(
    folder: Path, tmp_path: Path, ranks: int, learner: list[str]
) -> None:
    """From the third step on, tokens are two versions old.

    The first to be trained after the resumption need weights from before it.
    """
    make_recording(load(folder / "config.yaml", []), tmp_path / "bundle", STEPS, age=2)
    settings = [
        "pipeline.mode=async",
        f"run_dir={tmp_path}",
        f"rollout.bundle={tmp_path / 'bundle'}",
        *learner,
    ]
    alone, killed = (
        Job(
            learner_command(str(folder / "config.yaml"), [*settings, f"name={name}"], ranks),
            tmp_path / f"{name}.log",
        )
        for name in ("alone", "killed")
    )
    after_step(tmp_path / "killed", 2, killed)
    kill_everything(killed.process)
    command = learner_command(str(folder / "config.yaml"), [*settings, "name=killed"], ranks)
    again = Job(command, tmp_path / "again.log")
    assert (alone.wait(), again.wait()) == (0, 0), alone.output + again.output
    assert "going on after step" in again.output
    one, two = (
        [
            {key: value for key, value in row.items() if not key.startswith(TIMING)}
            for row in timeless(metrics_of(tmp_path / name))
        ]
        for name in ("alone", "killed")
    )
    assert one == two
    assert one[-1]["rollout/age_max"] == 2
    assert books_balance(metrics_of(tmp_path / "killed"))


@pytest.mark.long
@pytest.mark.parametrize("asked", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_asked_once_it_saves_and_another_layout_goes_on(folder: Path, alone: Path, asked: signal.Signals) -> None:
    """Interrupted on two ranks that share the experts, finished by one rank: the same training up to rounding."""
    name = f"moved-{asked.name}"
    run = folder / name
    job = start(folder, name, "checkpoint.every=0")
    after_step(run, 1, job)
    job.process.send_signal(asked)
    assert job.wait() == 128 + asked
    assert "goes on from" in job.output
    assert (run / "report.html").exists()
    done = len(metrics_of(run)) - 1
    assert 1 <= done < STEPS
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done:06d}"]

    refused = forked(folder, name, "checkpoint.every=0", ranks=1)
    assert refused.statuses == [REFUSED]
    assert "this run began with other settings" in refused.stderr
    finished = forked(folder, name, "checkpoint.every=0", "checkpoint.allow_changes=true", ranks=1)
    assert finished.ok, finished.stderr
    assert f"going on after step {done}" in finished.stdout
    assert f"changed after step {done}: learner.parallel.expert: 2 -> 1" in finished.stdout
    rows, expected = metrics_of(run), metrics_of(alone)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert books_balance(rows)
    assert timeless(rows[: done + 1]) == timeless(expected[: done + 1])
    for one, two in zip(rows[done + 1 :], expected[done + 1 :], strict=True):
        for key in ("engine/k3_kl", "optimizer/grad_norm", "loss/policy", "correction/kept_fraction"):
            assert one[key] == pytest.approx(two[key], rel=2e-3, abs=1e-6), key
        assert one["optimizer/lr"] == two["optimizer/lr"]
        assert one["ledger/issued"] == two["ledger/issued"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("tensor=2", "expert_tensor=2"),
        ("tensor=2", "expert=2"),
        ("pipeline=2",),
        ("pipeline=2", "pipeline_layout=Et|t||L"),
        ("context=2",),
    ],
    ids=lambda layout: "-".join(layout),
)
def test_any_layout_goes_on_and_saves_the_same_tensors(folder: Path, alone: Path, layout: tuple[str, ...]) -> None:
    """From step 2 of the expert-parallel run to its end on another layout: equal names, shapes, weights, moments."""
    name = "-".join(layout).replace("|", "_")
    parallel = [f"learner.parallel.{size}" for size in ("expert=1", *layout)]
    begin = f"checkpoint.resume={alone / 'checkpoints' / 'step-000002'}"
    job = start(folder, name, *parallel, begin, "train.export=true")
    assert job.wait() == 0, job.output
    assert_exports_what_the_learner_exported(folder / name, STEPS)
    one, two = (
        PieceReader(sorted((run / "checkpoints" / f"step-{STEPS:06d}").glob("rank-*")))
        for run in (alone, folder / name)
    )
    for kind, tolerance in (("weight", 1e-3), ("exp_avg", 1e-3), ("exp_avg_sq", 1e-3)):
        assert one.names(kind) == two.names(kind)
        for tensor in one.names(f"{kind}/"):
            expected = one.read(tensor)
            assert two.read(tensor).shape == expected.shape
            assert (two.read(tensor) - expected).abs().max() <= tolerance * expected.abs().max(), tensor


@pytest.mark.long
@pytest.mark.parametrize(
    "learner",
    [
        ("checkpoint.resume={alone}", "learner.freeze_router=true"),
        pytest.param(
            (
                "learner.parallel.expert=1",
                "learner.backend=deepspeed",
                "learner.deepspeed.zero_stage=3",
                "train.steps=1",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["megatron", "deepspeed"],
)
def test_a_checkpoint_exports_as_what_the_learner_would_have_exported(
    folder: Path, alone: Path, learner: tuple[str, ...]
) -> None:
    """Two ranks share what they saved; one process without ranks makes a Hugging Face folder of it.

    Plain transformers reads Megatron's. DeepSpeed's has the same files, and its final weights bit for bit.
    """
    megatron = "learner.backend=deepspeed" not in learner
    name = f"exported-{'megatron' if megatron else 'deepspeed'}"
    begin = alone / "checkpoints" / "step-000003"
    done = forked(folder, name, *(setting.format(alone=begin) for setting in learner), "train.export=true")
    assert done.ok, done.stderr
    exported = assert_exports_what_the_learner_exported(folder / name, RunFolder(folder / name, {}).steps()[0])
    if not megatron:
        return
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_AND_GENERATE, str(exported)], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert "tokens 4" in loaded.stdout


def test_an_export_refuses_what_it_cannot_make(
    folder: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is gone, a start checkpoint of another model, a damaged piece: nothing is left behind."""
    out = tmp_path / "out"
    assert moe_trm(["export", str(alone), "--step", "9"]) == 2
    assert "no checkpoint of that step" in capsys.readouterr().err
    assert moe_trm(["export", str(folder / "start")]) == 2
    assert "needs no export" in capsys.readouterr().err
    make_checkpoint(tmp_path / "other", shape=TinyShape(layers=2, hidden=64, experts=4, expert_ffn=16))
    assert moe_trm(["export", str(alone), "--out", str(out), "--model", str(tmp_path / "other")]) == 2
    assert "another model's" in capsys.readouterr().err
    deeper = tmp_path / "deeper"
    make_checkpoint(deeper, shape=TinyShape(layers=3, hidden=32, experts=4, expert_ffn=16))
    assert moe_trm(["export", str(alone), "--out", str(out), "--model", str(deeper)]) == 2
    assert "a trained tensor is missing" in capsys.readouterr().err
    damaged = tmp_path / "step-000002"
    shutil.copytree(alone / "checkpoints" / "step-000002", damaged)
    piece = damaged / "rank-00001.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1] + b"\x01")
    assert moe_trm(["export", str(damaged), "--out", str(out)]) == 2
    assert "does not match its checksum" in capsys.readouterr().err
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_finished_run_has_nothing_left_to_do(folder: Path, alone: Path) -> None:
    """The same command again, and one with other settings: no step is done twice, and the folder stays as it is."""
    names = ("config.json", "metrics.jsonl", "report.html", "run.json", "controller.log")
    before = [(alone / name).read_bytes() for name in names]
    done = forked(folder, "alone")
    assert done.ok, done.stderr
    assert "nothing is left to do" in done.stdout
    changed = forked(folder, "alone", "replay.mode=none", "train.steps=2")
    assert changed.statuses == [REFUSED, REFUSED]
    assert f"this run has finished: all its {STEPS} steps are done" in changed.stderr
    assert [(alone / name).read_bytes() for name in names] == before
    assert b"the controller begins" in before[-1]


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once_and_leaves_a_report(folder: Path, alone: Path) -> None:
    name = "twice"
    run = folder / name
    job = start(folder, name, "train.max_restarts=3")
    after_step(run, 1, job)
    everyone = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(300) == 128 + signal.SIGTERM
    assert not still_running(everyone, 120)
    assert (run / "report.html").stat().st_mtime >= (run / "metrics.jsonl").stat().st_mtime
    assert books_balance(metrics_of(run))
    again = start(folder, name)
    assert again.wait() == 0, again.output
    assert books_balance(metrics_of(run))
    assert timeless(metrics_of(run)) == timeless(metrics_of(alone))


@pytest.mark.slow
def test_an_error_that_can_only_repeat_uses_up_no_restart(folder: Path) -> None:
    """The routes are made up: a bound on local flips that real ones keep stops the run, once."""
    job = start(folder, "refused", "train.max_restarts=3", "replay.max_local_flip_rate=0.05", ranks=1)
    assert job.wait() == REFUSED, job.output
    assert job.output.count("MisalignedError:") == 1
    assert "again" not in job.output
    report = (folder / "refused" / "report.html").read_text()
    assert "failed" in report[: report.index("</header>")]
    assert "MisalignedError (step 1" in report[: report.index("</header>")]


@pytest.mark.slow
def test_when_the_job_is_killed_nothing_of_it_stays(folder: Path) -> None:
    """Ranks and controller, not only the processes that the job started itself."""
    command = [sys.executable, "-m", "moe_trm", "train", str(folder / "config.yaml"), "name=orphaned", "train.steps=4"]
    job = Job(command, folder / "orphaned.log")
    after_step(folder / "orphaned", 0, job)
    everyone = psutil.Process(job.process.pid).children(recursive=True)
    assert any("moe_trm.rollout.service" in process.cmdline() for process in everyone)
    job.process.kill()
    job.wait()
    assert not still_running(everyone, 120)
