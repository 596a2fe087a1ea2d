"""A job on several hosts: its server on one, torchrun on two others, everything started at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration import hosts as network
from tests.integration.hosts import Host, Hub
from tests.integration.jobs import write_config
from tests.unit.rollout.test_scripted_servers import SCRIPTED

ROOT = Path(__file__).parents[2]
REWARD = f"{Path(__file__).parent / 'objective_support' / 'reward.py'}:reward"
PORT, STEPS = 30100, 3
SETTINGS = [
    *(f"rollout.engine={SCRIPTED}", "rollout.trusted_network=true", f"train.steps={STEPS}", f"task.reward={REWARD}"),
    *("replay.mode=none", "probe.every=0", "probe.save=false", "sampling_mask.mode=off"),
    *("rollout.top_p=1", "correction.rules=[]", "task.eval_size=0"),
]
PATIENCE_S = 900.0
ENVIRONMENT = {
    "MOE_TRM_API_KEY": "key-of-the-hosts",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as in launch/slurm.sh
}
LOST_ATTEMPT, KILLED = "attempts left", "forcefully"
"""Words of torchrun: it starts ranks again; ranks did not end when they were asked to."""

pytestmark = pytest.mark.skipif(bool(network.missing()), reason=network.missing())


@dataclass
class Job:
    """One job: what it is started with, its processes and their logs by host."""

    folder: Path
    config: Path
    hub: Hub
    hosts: dict[str, Host]
    settings: list[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def begins(self) -> Path:
        """The server takes no connection before this file is there."""
        return self.folder / "begins"

    def log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def said(self, host: str) -> str:
        log = self.log(host)
        return log.read_text(errors="replace") if log.exists() else ""

    def serve(self, host: str, *options: str) -> None:
        """A rollout server, as README starts it."""
        extra = ", ".join(["--begins", str(self.begins), *options])
        own = ["rollout.server.host=0.0.0.0", f"rollout.server.port={PORT}", f"rollout.server.extra_args=[{extra}]"]
        self._start(host, ["launch.rollout", str(self.config), *self.settings, *own])

    def learn(self, first: str, *hosts: str, servers: Sequence[str] = ("h1",)) -> None:
        """torchrun on `first` and `hosts`, one rank on each."""
        urls = ",".join(f"http://{server}:{PORT}" for server in servers)
        torchrun = ["torch.distributed.run", "--nnodes", str(1 + len(hosts)), "--nproc-per-node", "1"]
        torchrun += ["--max-restarts", "3", "--rdzv-id", "7", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", f"{first}:29400", "-m", "launch.train", str(self.config), *self.settings]
        for host in (first, *hosts):
            self._start(host, [*torchrun, f"rollout.urls=[{urls}]"])

    def wait(self, *hosts: str) -> list[int]:
        """Exit statuses of what runs on these hosts."""
        until = time.monotonic() + PATIENCE_S
        return [self.processes[host].wait(max(1.0, until - time.monotonic())) for host in hosts]

    def until(self, happens: Callable[[], object]) -> None:
        """Return when `happens` is true; a process that ends before fails the test with its log."""
        until = time.monotonic() + PATIENCE_S
        while not happens():
            ended = [host for host, process in self.processes.items() if process.poll() is not None]
            assert not ended, "\n".join(self.said(host)[-3000:] for host in ended)
            assert time.monotonic() < until, "\n".join(self.said(host)[-3000:] for host in self.processes)
            time.sleep(0.1)

    def steps(self) -> list[int]:
        metrics = self.folder / "runs" / "live" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def _start(self, host: str, command: Sequence[str]) -> None:
        words = [sys.executable, "-m", *command]
        self.processes[host] = self.hosts[host].start(words, self.log(host), ENVIRONMENT, ROOT)


@contextmanager
def job(folder: Path, checkpoint: Path, names: Sequence[str], *settings: str, **own: str) -> Iterator[Job]:
    with network.hosts(*names, own_names=own) as (hub, made):
        config = write_config(folder, checkpoint)
        yield Job(folder, config, hub, {host.name: host for host in made}, [*SETTINGS, *settings])


def test_everything_starts_at_once_and_no_attempt_is_lost(tiny_moe: Path, tmp_path: Path) -> None:
    """The server is the last that is there. The first learner's hostname is 127.0.1.1 to itself, as on Debian."""
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3"), h2="127.0.1.1") as started:
        started.serve("h1")
        started.learn("h2", "h3")
        started.until(lambda: f"waiting for rollout server http://h1:{PORT}" in started.said("h2"))
        started.begins.touch()
        assert started.wait("h2", "h3") == [0, 0], started.said("h2")[-5000:] + started.said("h3")[-5000:]
        assert started.steps() == [*range(STEPS + 1)]
        for host in ("h2", "h3"):
            assert LOST_ATTEMPT not in started.said(host)
            assert KILLED not in started.said(host)


def test_ranks_that_wait_for_a_server_answer_sigterm(tiny_moe: Path, tmp_path: Path) -> None:
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3")) as started:
        started.learn("h2", "h3")
        started.until(lambda: f"waiting for rollout server http://h1:{PORT}" in started.said("h2"))
        for process in started.processes.values():
            process.terminate()
        assert all(started.wait("h2", "h3"))
        for host in ("h2", "h3"):
            assert KILLED not in started.said(host)
        end = json.loads((tmp_path / "runs" / "live" / "run.json").read_text())
        assert end["state"] == "stopped"
