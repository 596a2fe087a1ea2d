"""Whole jobs that are stopped as systemd, Slurm and Kubernetes stop them: what is reached is saved in the time given.

`test_slurm` does it under a real Slurm, and `tests.drills.stop_times` stops ranks during an update and a checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.short_run import metrics_of
from launch.job import free_port
from tests.drills.resume_drill import books_balance
from tests.drills.stop_times import KEY, SETTINGS, newest_checkpoint, serving
from tests.integration.jobs import still_running, write_config
from tests.integration.resume_support import Job

pytestmark = pytest.mark.slow

GRACE_S = 90.0
"""systemd's `TimeoutStopSec` by default; Slurm's KillWait and Kubernetes' grace period are in their templates."""
WAIT_S = 600.0
ANSWERS = 8
"""Of a step."""
SLOW = {"sampling": ["--token-s", "60", "--slow-from", str(ANSWERS)], "push": ["--load-s", "60"], "steps": []}
"""Options of the server: it takes a minute for a token of the second step, or for the push behind the first."""
ORDERS: dict[str, Callable[[Sequence[psutil.Process]], list[psutil.Process]]] = {
    "parents first": list,
    "children first": lambda everyone: [*reversed(everyone)],
    "any order": lambda everyone: random.Random(0).sample(everyone, len(everyone)),
}


def config_of(folder: Path, checkpoint: Path) -> list[str]:
    """Arguments of a run that saves only when it is told to stop."""
    config = write_config(folder, checkpoint)
    return [str(config), *SETTINGS, "checkpoint.every=100000", "checkpoint.allow_changes=true"]


def until(happens: Callable[[], object], job: Job) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        assert job.process.poll() is None, job.output[-5000:]
        assert time.monotonic() < end, job.output[-5000:]
        time.sleep(0.05)


def assert_goes_on(folder: Path, command: Sequence[str]) -> None:
    """The checkpoint is of the last step that the metrics have, and one more step follows it."""
    run = folder / "runs" / "live"
    last = len(metrics_of(run)) - 1
    assert last > 0
    assert newest_checkpoint(run) == last
    again = Job([*command, f"train.steps={last + 1}"], folder / "again.log")
    assert again.wait() == 0, again.output[-5000:]
    assert f"going on after step {last}" in again.output
    assert [row["step"] for row in metrics_of(run)] == list(range(last + 2))
    assert books_balance(metrics_of(run))


@pytest.mark.parametrize(
    ("moment", "order", "times"),
    [
        ("sampling", "children first", 1),
        ("sampling", "any order", 2),
        ("push", "parents first", 1),
        ("push", "children first", 2),
        ("steps", "any order", 1),
        ("steps", "parents first", 2),
    ],
)
def test_a_signal_to_a_whole_control_group(tiny_moe: Path, tmp_path: Path, moment: str, order: str, times: int) -> None:
    """As systemd stops a unit, and PBS a job: the server and its keeper get it as well."""
    command = [sys.executable, "-m", "moe_trm", "train", *config_of(tmp_path, tiny_moe)]
    run = tmp_path / "runs" / "live"
    slow = f"rollout.server.extra_args=[{','.join(repr(word) for word in SLOW[moment])}]"
    job = Job([*command, slow], tmp_path / "job.log")
    if moment == "push":
        until(lambda: (run / "rollout.log").exists() and "loading 1" in (run / "rollout.log").read_text(), job)
    else:
        until(lambda: len(metrics_of(run)) > 1, job)
    time.sleep(1.0)
    everyone = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
    assert len(everyone) >= 7, "the command, the server and its keeper, torchrun, two ranks, the controller"
    for _ in range(times):
        for number in (signal.SIGTERM, signal.SIGCONT):
            for process in ORDERS[order](everyone):
                if process.is_running():
                    process.send_signal(number)
        time.sleep(1.0)
    assert job.wait(GRACE_S) == 128 + signal.SIGTERM, job.output[-5000:]
    assert not still_running(everyone, 10)
    assert_goes_on(tmp_path, [*command, "rollout.server.extra_args=[]"])


def test_a_grace_period_that_ends_too_early_costs_the_steps_since_the_last_checkpoint(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """SIGKILL for every process while what is reached is being saved, and another run goes on."""
    command = [sys.executable, "-m", "moe_trm", "train", *config_of(tmp_path, tiny_moe), "checkpoint.every=2"]
    run = tmp_path / "runs" / "live"
    job = Job(command, tmp_path / "job.log")
    until(lambda: newest_checkpoint(run) > 0, job)
    everyone = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in everyone:
            if process.is_running():
                process.send_signal(number)
        time.sleep(0.1)
    assert job.wait(10) == -signal.SIGKILL
    saved, last = newest_checkpoint(run), len(metrics_of(run)) - 1
    assert 0 < saved <= last
    again = Job([*command, f"train.steps={last + 1}"], tmp_path / "again.log")
    assert again.wait() == 0, again.output[-5000:]
    assert f"going on after step {saved}" in again.output
    assert [row["step"] for row in metrics_of(run)] == list(range(last + 2))
    assert books_balance(metrics_of(run))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="it needs root and unshare")
@pytest.mark.parametrize("moment", ["sampling", "steps"])
def test_a_signal_to_process_1_of_a_container(tiny_moe: Path, tmp_path: Path, moment: str) -> None:
    """As Kubernetes stops a pod with the command of `launch/kubernetes.yaml`; then comes a SIGKILL to all."""
    port = free_port()
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks += ["-m", "launch.train", *config_of(tmp_path, tiny_moe), f"rollout.url=http://127.0.0.1:{port}"]
    run = tmp_path / "runs" / "live"
    with serving(SLOW[moment], port):
        pod = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *ranks]
        settings = {"MOE_TRM_API_KEY": KEY, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_S))}
        job = Job(pod, tmp_path / "job.log", **settings)
        until(lambda: len(metrics_of(run)) > 1, job)
        time.sleep(1.0)
        (first,) = psutil.Process(job.process.pid).children()
        everyone = [first, *first.children(recursive=True)]
        os.kill(first.pid, signal.SIGTERM)
        assert job.wait(GRACE_S) != 0
        assert not still_running(everyone, 1)
    with serving([], port):
        assert_goes_on(tmp_path, ["env", f"MOE_TRM_API_KEY={KEY}", *ranks])
