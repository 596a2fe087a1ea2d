"""The controller as a process: its end, whoever or whatever ends it, from its first instruction on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import ControllerError
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.rollout.client import ControllerProcess
from tests.unit.processes import wait_until_dead

RANK = """
import sys, time
from pathlib import Path
from moe_trm.config.schema import Config
from moe_trm.rollout.client import ControllerProcess
process = ControllerProcess(Config.model_validate_json(sys.argv[1]), None, Path(sys.argv[2]))
print(process._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """Of a run whose server takes connections and never answers."""
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(checkpoint, shape=TinyShape(layers=1, hidden=32, experts=4, expert_ffn=16))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        rollout = {"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "server": {"startup_timeout_s": 600.0}}
        yield Config.model_validate({"model": {"checkpoint": str(checkpoint)}, "rollout": rollout})


def said(log: Path, words: str, patience_s: float = 120.0) -> bool:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and not (log.exists() and words in log.read_text()):
        time.sleep(0.02)
    return words in log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["imports", "waits for its server"])
def test_it_ends_with_its_rank(tmp_path: Path, config: Config, moment: str) -> None:
    log = tmp_path / "controller.log"
    command = [sys.executable, "-c", RANK, config.model_dump_json(), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        if moment != "imports":
            assert said(log, "the controller begins")
        rank.kill()
    assert wait_until_dead([pid], 60)
    if moment != "imports":
        assert "the controller was asked to end" in log.read_text()
        assert "Traceback" not in log.read_text()


def test_a_killed_one_is_told_with_its_log(tmp_path: Path, config: Config) -> None:
    log = tmp_path / "controller.log"
    log.write_text("the last words of an earlier start\n")
    process = ControllerProcess(config, None, log)
    try:
        assert said(log, "the controller begins")
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait(60)
        with pytest.raises(ControllerError, match="ended by SIGKILL") as told:
            process.check()
        assert "the controller begins" in told.value.fix
        assert "earlier start" not in told.value.fix
        assert "earlier start" in log.read_text()
    finally:
        process.wait(0.0)


def test_an_error_of_its_rank_asks_it_before_it_is_killed(tmp_path: Path, config: Config) -> None:
    log = tmp_path / "controller.log"
    process = ControllerProcess(config, None, log)
    assert said(log, "the controller begins")
    process.wait(0.0)
    assert process._process.poll() == 128 + signal.SIGTERM
    assert "the controller was asked to end" in log.read_text()
