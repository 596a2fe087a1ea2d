"""The rollout server of a job: `launch.rollout` in a process of its own, in front of a scripted SGLang."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from launch.job import Signals, free_port, wait_for
from launch.rollout_process import RolloutProcess
from tests.unit.processes import wait_until_dead

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("dies", [False, True])
def test_a_job_sees_when_its_server_is_ready_or_will_not_be(
    tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], dies: bool
) -> None:
    """It gets the key by its environment, writes its log, and ends with the job."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)]))
    path, port = tmp_path / "config.yaml", free_port()
    extra = "extra_args: ['--die', 'yes']" if dies else "extra_args: []"
    server = f"server: {{port: {port}, device: cpu, startup_timeout_s: 300, {extra}}}"
    path.write_text(f"name: a\nrun_dir: {tmp_path}\nmodel: {{checkpoint: {tmp_path}}}\nrollout: {{{server}}}\n")
    with Signals() as signals, RolloutProcess(str(path), [], "secret-key") as started:
        status = wait_for(started, signals)
        if dies:
            assert status == 1
            assert "died while starting" in capfd.readouterr().err
            return
        assert status is None, capfd.readouterr().err
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as response:
            assert response.status == 200
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert wait_until_dead(pids, 60.0)
    said = (tmp_path / "a" / "rollout.log").read_text().splitlines()
    assert said[0] == 'server_args api-key: "***" 1 1'
