"""`launch/slurm.sh` under a real Slurm: its daemons on three hosts of this machine, and a scripted engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_trm.runtime.gloo import INTERFACE
from tests.integration import hosts as network
from tests.integration.hosts import Host
from tests.integration.jobs import write_config
from tests.integration.test_hosts import ENVIRONMENT, LOST_ATTEMPT, PATIENCE_S, ROOT, SETTINGS

DAEMONS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
ABSENT = [name for name in DAEMONS if shutil.which(name) is None]
LOADING_S = 300.0
CONFIGURATION = """
ClusterName=moetrm
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
ReturnToService=2
MessageTimeout=100
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network.missing()), reason=network.missing()),
    pytest.mark.skipif(bool(ABSENT), reason=f"Slurm is not installed: {', '.join(ABSENT)}"),
]


@dataclass
class Cluster:
    """Three nodes, a server on the first; `config` is of the run that is submitted."""

    folder: Path
    config: Path
    first: Host

    @property
    def begins(self) -> Path:
        """The server takes no connection before this file is there."""
        return self.folder / "begins"

    @property
    def said(self) -> str:
        """The output of all jobs."""
        log = self.folder / "job.out"
        return log.read_text(errors="replace") if log.exists() else ""

    def submit(self, *settings: str) -> str:
        """The number of a new job."""
        options = ["--nodes=3", "--gpus-per-node=1", f"--output={self.folder / 'job.out'}", "--parsable"]
        server = f"rollout.server.extra_args=[--begins,{self.begins}]"
        script = [str(ROOT / "launch" / "slurm.sh"), str(self.config), *SETTINGS, server, *settings]
        return self.ask("sbatch", *options, *script).strip()

    def ask(self, *command: str) -> str:
        """The output of a command on the first node."""
        words, variables = self.first.inside(command), environment(self.folder)
        return subprocess.run(words, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout

    def state(self, job: str) -> str:
        fields = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return next(field.partition("=")[2] for field in fields if field.startswith("JobState="))

    def steps(self) -> list[int]:
        metrics = self.folder / "runs" / "live" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def until(self, happens: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happens():
            assert time.monotonic() < end, self.said[-5000:]
            time.sleep(0.5)


def environment(folder: Path) -> dict[str, str]:
    """As a user has it on the nodes: this Python, and Slurm's configuration."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if name != INTERFACE}  # tests before may set it
    return {**variables, **ENVIRONMENT, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_CONF": f"{folder}/slurm.conf"}


@contextmanager
def cluster(folder: Path, checkpoint: Path) -> Iterator[Cluster]:
    with network.hosts("h1", "h2", "h3") as (_, nodes):
        lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs={os.cpu_count()} Gres=gpu:1" for node in nodes]
        described = {"first": nodes[0].name, "address": nodes[0].address, "folder": folder, "nodes": "\n".join(lines)}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**described))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # a namespace of the network hides cgroups
        (folder / "state").mkdir()
        daemons: Sequence[tuple[Host, list[str]]] = [
            (nodes[0], ["slurmctld", "-D", "-i"]),
            *((node, ["slurmd", "-D", "-N", node.name]) for node in nodes),
        ]
        for node, command in daemons:
            (folder / f"spool-{node.name}").mkdir(exist_ok=True)
            node.start(command, folder / f"{command[0]}-{node.name}.log", environment(folder), folder)
        made = Cluster(folder, write_config(folder, checkpoint), nodes[0])
        made.until(lambda: made.ask("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * 3)
        yield made


def test_a_server_that_loads_for_long_costs_no_attempt(tiny_moe: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, tiny_moe) as slurm:
        job = slurm.submit()
        slurm.until(lambda: "waiting for rollout server http://h1:30100" in slurm.said)
        time.sleep(LOADING_S)
        slurm.begins.touch()
        slurm.until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
        assert slurm.state(job) == "COMPLETED", slurm.said[-5000:]
        assert slurm.steps() == [0, 1, 2, 3]
        assert LOST_ATTEMPT not in slurm.said


def test_a_job_saves_before_its_end_and_goes_on_when_it_is_preempted(tiny_moe: Path, tmp_path: Path) -> None:
    """Nothing is saved but for the signals: that of `#SBATCH --signal`, and those of a requeue."""
    endless = ("train.steps=1000", "checkpoint.every=100000")
    with cluster(tmp_path, tiny_moe) as slurm:
        slurm.begins.touch()
        job = slurm.submit(*endless)
        slurm.until(lambda: len(slurm.steps()) > 1)
        slurm.ask("scancel", "--batch", "--signal=TERM", job)
        slurm.until(lambda: slurm.state(job) == "FAILED")
        saved = slurm.steps()[-1]
        job = slurm.submit(*endless)
        slurm.until(lambda: slurm.steps()[-1] > saved)
        assert slurm.steps() == [*range(slurm.steps()[-1] + 1)], "the step of the signal was saved"
        slurm.ask("scontrol", "requeue", job)
        slurm.until(lambda: slurm.state(job) == "PENDING")
        preempted = slurm.steps()[-1]
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        slurm.until(lambda: slurm.steps()[-1] > preempted)
        assert slurm.steps() == [*range(slurm.steps()[-1] + 1)], "the step of the requeue was saved"
        slurm.ask("scancel", job)
        slurm.until(lambda: slurm.state(job) == "CANCELLED")


def test_a_signal_to_srun_itself_costs_what_is_not_saved(tiny_moe: Path, tmp_path: Path) -> None:
    """`scancel --full` sends it to the batch script and all that it started, and `srun` then kills its steps."""
    settings = ("train.steps=1000", "checkpoint.every=1")
    with cluster(tmp_path, tiny_moe) as slurm:
        slurm.begins.touch()
        job = slurm.submit(*settings)
        slurm.until(lambda: len(slurm.steps()) > 3)
        slurm.ask("scancel", "--full", "--signal=TERM", job)
        slurm.until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
        assert "Killed" in slurm.said
        reached = slurm.steps()[-1]
        job = slurm.submit(*settings)
        slurm.until(lambda: slurm.steps() and slurm.steps()[-1] > reached)
        assert "going on after step" in slurm.said
        assert slurm.steps() == [*range(slurm.steps()[-1] + 1)]
        slurm.ask("scancel", job)
        slurm.until(lambda: slurm.state(job) == "CANCELLED")
