"""A real server whose keeper is slow or stopped goes on: its output waits in a file that never fills up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from launch.job import free_port
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers import process as supervisor
from moe_trm.rollout.servers.process import Server
from tests.integration.jobs import still_running

PIPE_BYTES = 1 << 16
"""Bytes that a pipe which nobody reads takes before the writer stands still."""
LINE = "x" * 4000


def ask(url: str, key: str, body: dict[str, object] | None = None) -> int:
    """The status of a request whose line in the server's log is long; `--log-level-http info` writes it."""
    request = urllib.request.Request(
        f"{url}/{'generate' if body else 'model_info'}?{LINE}",
        data=json.dumps(body).encode() if body else None,
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(answer.status)


def talk(url: str, key: str) -> int:
    """Make the server write much more than a pipe holds, and sample after that; the bytes that it wrote at least."""
    number = 3 * PIPE_BYTES // len(LINE)
    assert {ask(url, key) for _ in range(number)} == {200}
    assert ask(url, key, {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}) == 200
    return number * len(LINE)


def test_a_server_whose_keeper_is_slow_goes_on_and_nothing_of_its_log_is_lost(
    rollout_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper looks at the output when all of it has been written, and not before."""
    log = rollout_server.log_path
    with monkeypatch.context() as slow:
        slow.setattr(supervisor, "POLL_S", 5.0)
        time.sleep(0.5)  # it is in its long pause by now
        before = log.stat().st_size
        written = talk(rollout_server.url, rollout_server.api_key)
    deadline = time.monotonic() + 120
    while log.stat().st_size < before + written:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_server_whose_keeper_is_stopped_goes_on(tiny_moe: Path, tmp_path: Path) -> None:
    server = {"port": free_port(), "dtype": "float32", "max_total_tokens": 8192}
    settings = {
        "name": "kept",
        "run_dir": str(tmp_path),
        "model": {"checkpoint": str(tiny_moe)},
        "rollout": {"server": server | {"extra_args": ["--log-level-http", "info"]}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    key = "key-of-the-kept-server"
    with subprocess.Popen(
        [sys.executable, "-m", "launch.rollout", str(tmp_path / "config.yaml")],
        env={**os.environ, API_KEY_VARIABLE: key},
        stdout=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        said = [keeper.stdout.readline(), keeper.stdout.readline()]
        url = said[1].split()[-1]
        everyone = psutil.Process(keeper.pid).children(recursive=True)
        keeper.send_signal(signal.SIGSTOP)
        try:
            talk(url, key)
        finally:
            keeper.send_signal(signal.SIGCONT)
        keeper.terminate()
        assert keeper.wait(120) == 0
    assert not still_running(everyone, 60)
