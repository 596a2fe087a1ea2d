"""Runs that are killed, interrupted, damaged or starved of disk, and go on. Real learner ranks on recorded rollouts, no engine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.resume_drill import kill_everything, metrics_of, run_drill, timeless
from launch.job import free_port, learner_command, learner_environment
from moe_trm.config import load
from moe_trm.quickstart.checkpoint import TinyShape, make_checkpoint
from tests.integration.recordings import make_recording

STEPS = 4
CONFIG = """
name: run
run_dir: {folder}
model: {{checkpoint: {folder}/start}}
task: {{max_digits: 1, eval_size: 0}}
rollout: {{engine: bundle, bundle: {folder}/bundle, prompts_per_step: 2, group_size: 4}}
replay: {{max_local_flip_rate: 1.0}}
probe: {{every: 2}}
correction:
  calibration_steps: 3
  rules: [{{name: trm_max, target_reject_rate: 0.25}}]
learner: {{minibatches: 2, micro_batch_rows: 2}}
checkpoint: {{every: 1}}
train: {{steps: {steps}, export: false}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, hf_models: None) -> Path:
    """A tiny checkpoint, a configuration, and a recording of its rollouts."""
    folder = tmp_path_factory.mktemp("resume")
    make_checkpoint(folder / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    make_recording(load(folder / "config.yaml", []), folder / "bundle", STEPS)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The run on two ranks that nothing happened to."""
    assert start(folder, "alone").wait(120) == 0
    return folder / "alone"


def start(folder: Path, name: str, *overrides: str, ranks: int = 2) -> subprocess.Popen[str]:
    command = learner_command(
        str(folder / "config.yaml"), [f"name={name}", f"learner.parallel.expert={ranks}", *overrides], ranks
    )
    return subprocess.Popen(
        command, env=learner_environment(None), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def after_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return once the metrics of `step` are written."""
    deadline = time.monotonic() + 120
    while len(metrics_of(run)) <= step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_at_random_moments_a_run_ends_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    drill = run_drill(str(folder / "config.yaml"), [], str(folder / "bundle"), tmp_path, ranks=2, kills=2, seed=3)
    assert drill.kills == 2
    assert drill.identical


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_often(folder: Path, tmp_path: Path, ranks: int) -> None:
    drill = run_drill(str(folder / "config.yaml"), [], str(folder / "bundle"), tmp_path, ranks=ranks, kills=6, seed=4)
    assert drill.identical


def test_ctrl_c_once_saves_and_another_layout_goes_on(folder: Path, alone: Path) -> None:
    """Interrupted on two ranks that share the experts, finished by one rank: the same training up to rounding."""
    process = start(folder, "moved", "checkpoint.every=0")
    after_step(folder / "moved", 1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    done = len(metrics_of(folder / "moved")) - 1
    assert 1 <= done < STEPS
    assert "goes on from" in process.communicate()[0]
    saved = folder / "moved" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == [f"step-{done:06d}"]
    finished = start(folder, "moved", "checkpoint.every=0", ranks=1)
    output = finished.communicate(timeout=120)[0]
    assert finished.returncode == 0, output
    assert f"going on after step {done}" in output
    assert "learner.parallel.expert: 2 -> 1" in output
    rows, expected = metrics_of(folder / "moved"), metrics_of(alone)
    assert timeless(rows[: done + 1]) == timeless(expected[: done + 1])
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for one, two in zip(rows[done + 1 :], expected[done + 1 :], strict=True):
        for key in ("engine/k3_kl", "optimizer/grad_norm", "loss/policy", "correction/kept_fraction"):
            assert one[key] == pytest.approx(two[key], rel=2e-3, abs=1e-6), key
        assert one["optimizer/lr"] == two["optimizer/lr"]
        assert one["ledger/issued"] == two["ledger/issued"]


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(folder: Path) -> None:
    process = start(folder, "twice", "train.steps=4")
    after_step(folder / "twice", 0, process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(everyone, timeout=15)
    assert not alive


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_group_goes_on(folder: Path, alone: Path) -> None:
    process = start(folder, "rank-killed", "train.max_restarts=1")
    after_step(folder / "rank-killed", 2, process)
    ranks = [child for child in psutil.Process(process.pid).children() if "launch.train" in child.cmdline()]
    assert len(ranks) == 2
    ranks[1].kill()
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output
    assert "going on after step" in output
    assert timeless(metrics_of(folder / "rank-killed")) == timeless(metrics_of(alone))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_costs_one_step(folder: Path, alone: Path) -> None:
    shutil.copytree(alone, folder / "damaged")
    newest = folder / "damaged" / "checkpoints" / f"step-{STEPS:06d}"
    with (newest / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    process = start(folder, "damaged")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "checkpoint skipped" in output
    assert f"going on after step {STEPS - 1}" in output
    assert timeless(metrics_of(folder / "damaged")) == timeless(metrics_of(alone))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of this model and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_run_goes_on_with_older_checkpoints_intact(
    folder: Path, alone: Path, small_disk: Path
) -> None:
    process = start(folder, "full", f"checkpoint.dir={small_disk}")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "No space left on device" in output
    assert timeless(metrics_of(folder / "full")) == timeless(metrics_of(alone))
    kept = sorted(small_disk.iterdir())
    assert [path.name for path in kept] == ["step-000001"]
    again = start(folder, "full", f"checkpoint.dir={small_disk}", "train.steps=2")
    output = again.communicate(timeout=120)[0]
    assert "going on after step 1" in output


@pytest.mark.slow
def test_two_hosts_meet_and_one_that_dies_is_waited_for(folder: Path, alone: Path) -> None:
    """Two torchrun agents, as two machines would start them, with one rank each; one is killed with all it started, and comes back."""
    endpoint = f"127.0.0.1:{free_port()}"

    def host(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--max-restarts", "3"]
        command += ["--local-addr", "127.0.0.1", "-m", "launch.train", str(folder / "config.yaml")]
        command += ["name=hosts", "learner.parallel.expert=2"]
        environment = {**learner_environment(None), "TORCHELASTIC_ERROR_FILE": ""}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    hosts = [host(0)]
    time.sleep(1)  # the first to come holds the rendezvous
    hosts.append(host(1))
    after_step(folder / "hosts", 2, hosts[0])
    kill_everything(hosts[1])  # type: ignore[arg-type]
    hosts[1] = host(1)
    outputs = [process.communicate(timeout=240)[0] for process in hosts]
    assert [process.returncode for process in hosts] == [0, 0], outputs
    assert any("going on after step" in output for output in outputs)
    assert timeless(metrics_of(folder / "hosts")) == timeless(metrics_of(alone))


def test_a_finished_run_has_nothing_left_to_do(folder: Path, alone: Path) -> None:
    """The same command again: no step is done twice, and the metrics stay as they are."""
    before = (alone / "metrics.jsonl").read_bytes()
    process = start(folder, "alone")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "all 4 steps are done" in output
    assert (alone / "metrics.jsonl").read_bytes() == before
