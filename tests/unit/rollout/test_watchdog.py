"""A server that dies, stops or hangs is started again on its port, a late one is not; at last one is given up."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError
from moe_trm.rollout.servers import watchdog as watchdog_module
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.watchdog import Watchdog
from tests.unit.processes import wait_until_dead
from tests.unit.rollout.test_server_process import config


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_S", 0.05), ("LOOK_S", 0.1), ("LAST_ASK_S", 1.0)):
        monkeypatch.setattr(watchdog_module, name, seconds)


def settings(tmp_path: Path, **server: object) -> Config:
    base = config(tmp_path)
    changed = base.rollout.server.model_copy(update={"silence_timeout_s": 0.5, **server})
    return base.model_copy(update={"rollout": base.rollout.model_copy(update={"server": changed})})


def until(happened: Callable[[], bool], patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_lost_is_started_again_on_its_port(
    fault: signal.Signals, tmp_path: Path, pids_file: Path
) -> None:
    with Watchdog(Served.of(settings(tmp_path)), tmp_path / "rollout.log", "key") as watchdog:
        url, first = watchdog.url, watchdog.server.process.pid
        lost = [int(pid) for pid in pids_file.read_text().split()]
        os.killpg(first, fault)
        until(lambda: watchdog.server.process.pid != first)
        assert watchdog.url == url
        assert watchdog.restarts == 1
        assert wait_until_dead(lost)
    assert wait_until_dead([int(pid) for pid in pids_file.read_text().split()])


def test_a_restart_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk. The thread that watches is the only one that can."""
    with Watchdog(Served.of(settings(tmp_path)), tmp_path / "rollout.log", "key") as watchdog:
        first, start, refusals = watchdog.server.process.pid, start_server, [OSError("full")]

        def refuses_once(*args: Any, **options: Any) -> Server:
            if refusals:
                raise refusals.pop()
            return start(*args, **options)

        monkeypatch.setattr(watchdog_module, "start_server", refuses_once)
        os.killpg(first, signal.SIGKILL)
        until(lambda: watchdog.server.process.pid != first)
        assert watchdog.restarts == 2


def test_after_its_last_restart_a_server_is_given_up(tmp_path: Path, pids_file: Path) -> None:
    with Watchdog(Served.of(settings(tmp_path, max_restarts=0)), tmp_path / "rollout.log", "key") as watchdog:
        os.killpg(watchdog.server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="given up after 0 restarts"):
            watchdog.wait()


def test_a_server_that_is_late_because_it_computes_gets_more_time(
    tmp_path: Path, pids_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = settings(tmp_path, silence_timeout_s=0.3, extra_args=("--burn", "3.0"))
    with Watchdog(Served.of(busy), tmp_path / "rollout.log", "key") as watchdog:
        first = watchdog.server.process.pid
        until(lambda: "it gets more time" in caplog.text)
        with urllib.request.urlopen(f"{watchdog.url}/model_info", timeout=20) as answer:
            assert answer.status == 200
        assert (watchdog.restarts, watchdog.server.process.pid) == (0, first)


@pytest.mark.parametrize(
    ("fault", "hang_timeout_s", "said"),
    [("--doze", 600.0, "neither answered nor computed for 0.3 s"), ("--burn", 0.8, "generated nothing for ")],
)
def test_a_server_that_sleeps_or_computes_for_ever_hangs(
    fault: str, hang_timeout_s: float, said: str, tmp_path: Path, pids_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one is busy, which is no excuse beyond the longest standstill."""
    limits = {"silence_timeout_s": 0.3, "hang_timeout_s": hang_timeout_s, "max_restarts": 0}
    hanging = settings(tmp_path, **limits, extra_args=(fault, "60"))
    with Watchdog(Served.of(hanging), tmp_path / "rollout.log", "key") as watchdog:
        with pytest.raises(EngineError, match="given up after 0 restarts"):
            watchdog.wait()
        assert said in caplog.text
