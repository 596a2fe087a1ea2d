"""A server that dies or stops is started again on its port; one that cannot be kept is given up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError
from moe_trm.rollout.sglang import watchdog as watchdog_module
from moe_trm.rollout.sglang.watchdog import Watchdog
from tests.unit.rollout.test_supervisor import config, wait_until_dead


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_S", 0.05), ("LOOK_S", 0.1), ("ANSWER_S", 1.0)):
        monkeypatch.setattr(watchdog_module, name, seconds)


def settings(tmp_path: Path, **server: object) -> Config:
    base = config(tmp_path)
    changed = base.rollout.server.model_copy(update=server)
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
    with Watchdog(settings(tmp_path), tmp_path / "rollout.log", "key") as watchdog:
        url, first = watchdog.url, watchdog.server.process.pid
        lost = [int(pid) for pid in pids_file.read_text().split()]
        os.killpg(first, fault)
        until(lambda: watchdog.server.process.pid != first)
        assert watchdog.url == url
        assert watchdog.restarts == 1
        assert wait_until_dead(lost)
    assert wait_until_dead([int(pid) for pid in pids_file.read_text().split()])


def test_after_its_last_restart_a_server_is_given_up(tmp_path: Path, pids_file: Path) -> None:
    with Watchdog(settings(tmp_path, max_restarts=0), tmp_path / "rollout.log", "key") as watchdog:
        os.killpg(watchdog.server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="given up after 0 restarts"):
            watchdog.wait()
