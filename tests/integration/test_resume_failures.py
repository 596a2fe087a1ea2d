"""Runs whose rank, host, newest checkpoint or disk fails, and that go on: real ranks on recorded rollouts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.short_run import metrics_of
from launch.job import free_port
from tests.drills.resume_drill import books_balance, kill_everything, timeless
from tests.integration.resume_support import STEPS, Job, after_step, start
from tests.integration.resume_support import alone as alone
from tests.integration.resume_support import folder as folder

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_replaced_and_the_group_goes_on(folder: Path, alone: Path) -> None:
    name = "rank-killed"
    run = folder / name
    job = start(folder, name, "train.max_restarts=1")
    after_step(run, 2, job)
    max(psutil.Process(job.process.pid).children(), key=lambda child: (child.create_time(), child.pid)).kill()
    assert job.wait() == 0, job.output
    assert "starting the learner ranks again (1 of 1)" in job.output
    assert "going on after step" in job.output
    assert books_balance(metrics_of(run))
    assert timeless(metrics_of(run)) == timeless(metrics_of(alone))


def test_a_damaged_newest_checkpoint_costs_one_step(folder: Path, alone: Path) -> None:
    run = folder / "damaged"
    shutil.copytree(alone, run)
    (run / "run.json").unlink()  # it has not finished
    newest = run / "checkpoints" / f"step-{STEPS:06d}"
    with (newest / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    job = start(folder, "damaged")
    assert job.wait() == 0, job.output
    assert "checkpoint skipped" in job.output
    assert f"going on after step {STEPS - 1}" in job.output
    assert books_balance(metrics_of(run))
    assert timeless(metrics_of(run)) == timeless(metrics_of(alone))


@pytest.fixture
def small_disk(folder: Path, alone: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of this model and not for two."""
    newest = alone / "checkpoints" / f"step-{STEPS:06d}"
    room = int(1.5 * sum(path.stat().st_size for path in newest.iterdir()))
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_and_the_run_goes_on_with_older_checkpoints_intact(
    folder: Path, alone: Path, small_disk: Path
) -> None:
    job = start(folder, "full", f"checkpoint.dir={small_disk}")
    assert job.wait() == 0, job.output
    assert "No space left on device" in job.output
    assert books_balance(metrics_of(folder / "full"))
    assert timeless(metrics_of(folder / "full")) == timeless(metrics_of(alone))
    assert [path.name for path in small_disk.glob("[!.]*")] == ["step-000001"]
    again = start(folder, "branched", f"checkpoint.resume={small_disk / 'step-000001'}", "train.steps=2")
    assert again.wait() == 0, again.output
    assert "going on after step 1" in again.output


def test_two_hosts_meet_and_one_that_dies_comes_back(folder: Path, alone: Path) -> None:
    """Two torchrun agents as on two machines, one rank each; one is killed with its children and started again."""
    endpoint = f"127.0.0.1:{free_port()}"

    def host(number: int) -> Job:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--max-restarts", "3"]
        command += ["--local-addr", "127.0.0.1", "-m", "launch.train", str(folder / "config.yaml")]
        command += ["name=hosts", "learner.parallel.expert=2"]
        return Job(command, folder / f"host-{number}.log", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    hosts = [host(0)]
    time.sleep(2)  # the first to come holds the rendezvous
    hosts.append(host(1))
    after_step(folder / "hosts", 2, hosts[0])
    kill_everything(hosts[1].process)
    hosts[1] = host(1)
    assert [job.wait(300) for job in hosts] == [0, 0], hosts[0].output + hosts[1].output
    assert "going on after step" in hosts[0].output + hosts[1].output
    assert books_balance(metrics_of(folder / "hosts"))
    assert timeless(metrics_of(folder / "hosts")) == timeless(metrics_of(alone))
