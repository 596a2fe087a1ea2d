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
from typing import Any

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
LOADING_S = 300.0
AWAY_S = 30.0
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
    torchrun: list[str] = field(default_factory=list)

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
        self.torchrun = [*torchrun, f"rollout.urls=[{urls}]"]
        for host in (first, *hosts):
            self.join(host)

    def join(self, host: str) -> None:
        """torchrun on one more host, or again on one that was away."""
        self._start(host, self.torchrun)

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

    def rows(self) -> list[dict[str, Any]]:
        metrics = self.folder / "runs" / "live" / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows()]

    def _start(self, host: str, command: Sequence[str]) -> None:
        words = [sys.executable, "-m", *command]
        self.processes[host] = self.hosts[host].start(words, self.log(host), ENVIRONMENT, ROOT)


@contextmanager
def job(folder: Path, checkpoint: Path, names: Sequence[str], *settings: str, **own: str) -> Iterator[Job]:
    with network.hosts(*names, own_names=own) as (hub, made):
        config = write_config(folder, checkpoint)
        yield Job(folder, config, hub, {host.name: host for host in made}, [*SETTINGS, *settings])


@pytest.mark.long
@pytest.mark.parametrize("loading_s", [0.0, pytest.param(LOADING_S, marks=pytest.mark.slow)])
def test_everything_starts_at_once_and_no_attempt_is_lost(tiny_moe: Path, tmp_path: Path, loading_s: float) -> None:
    """The server is the last that is there. The first learner's hostname is 127.0.1.1 to itself, as on Debian."""
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3"), h2="127.0.1.1") as started:
        started.serve("h1")
        started.learn("h2", "h3")
        started.until(lambda: f"waiting for rollout server http://h1:{PORT}" in started.said("h2"))
        time.sleep(loading_s)
        started.begins.touch()
        assert started.wait("h2", "h3") == [0, 0], started.said("h2")[-5000:] + started.said("h3")[-5000:]
        assert started.steps() == [*range(STEPS + 1)]
        for host in ("h2", "h3"):
            assert LOST_ATTEMPT not in started.said(host)
            assert KILLED not in started.said(host)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_host_that_vanishes_comes_back_into_the_run(tiny_moe: Path, tmp_path: Path) -> None:
    """Its cable is cut and its processes are dead. torchrun is started there again."""
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3"), "train.steps=6", "checkpoint.every=1") as started:
        started.begins.touch()
        started.serve("h1")
        started.learn("h2", "h3")
        started.until(lambda: len(started.steps()) > 2)
        started.hosts["h3"].vanish()
        time.sleep(AWAY_S)
        started.hosts["h3"].port.cut = False
        started.join("h3")
        assert started.wait("h2", "h3") == [0, 0], started.said("h2")[-5000:] + started.said("h3")[-5000:]
        assert started.steps() == [*range(7)]


@pytest.mark.slow
def test_cables_that_delay_and_drop_cost_nothing_but_time(tiny_moe: Path, tmp_path: Path) -> None:
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3")) as started:
        started.hub.delay_s, started.hub.loss = 0.01, 0.01
        started.begins.touch()
        started.serve("h1")
        started.learn("h2", "h3")
        assert started.wait("h2", "h3") == [0, 0], started.said("h2")[-5000:] + started.said("h3")[-5000:]
        assert started.steps() == [*range(STEPS + 1)]
        assert LOST_ATTEMPT not in started.said("h2") + started.said("h3")


@pytest.mark.slow
def test_a_server_whose_cable_is_cut_gets_the_weights_that_it_missed(tiny_moe: Path, tmp_path: Path) -> None:
    """The run goes on with the other server meanwhile, and no attempt is lost."""
    settings = ("train.steps=40", "rollout.timeout_s=10", "rollout.server.silence_timeout_s=5")
    with job(tmp_path, tiny_moe, ("h1", "h2", "h3", "h4"), *settings) as started:
        started.begins.touch()
        for host in ("h1", "h4"):
            started.serve(host)
        started.learn("h2", "h3", servers=("h1", "h4"))
        started.until(lambda: len(started.rows()) > 2)
        assert started.rows()[-1]["rollout/servers"] == 2
        started.hosts["h4"].port.cut = True
        started.until(lambda: started.rows()[-1]["rollout/servers"] == 1)
        started.hosts["h4"].port.cut = False
        started.until(lambda: started.rows()[-1]["rollout/servers"] == 2)
        assert started.wait("h2", "h3") == [0, 0], started.said("h2")[-5000:] + started.said("h3")[-5000:]
        assert started.steps() == [*range(41)]
        assert LOST_ATTEMPT not in started.said("h2") + started.said("h3")
