"""The example of repairs as a whole run: a tiny policy, a real server, sandboxes, and rewards that rise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import metrics_of, run_job
from tests.unit.rollout.agents.test_repair_example import EXAMPLE, needs_namespaces

STEPS = 4


@pytest.mark.slow
def test_a_tiny_policy_learns_to_repair_in_sandboxes(tmp_path: Path) -> None:
    needs_namespaces()
    subprocess.run([sys.executable, str(EXAMPLE / "start.py"), str(tmp_path / "start")], check=True)
    settings = [f"run_dir={tmp_path}", f"model.checkpoint={tmp_path / 'start'}", "rollout.server.port=0"]
    settings += ["rollout.server.startup_timeout_s=600", f"train.steps={STEPS}"]
    assert run_job(str(EXAMPLE / "cpu.yaml"), settings) == 0
    rows = metrics_of(tmp_path / "repair_cpu")[1:]
    assert all(row["replay/applied_fraction"] == 1.0 for row in rows)
    assert rows[-1]["agent/sessions"] == 16 * STEPS
    assert rows[-1]["agent/cut"] == rows[-1]["agent/left_out_tokens"] == rows[-1]["ledger/rejected"] == 0
    assert 0 < rows[0]["reward/mean"] < rows[-1]["reward/mean"]
    [text] = [path.read_text() for path in (tmp_path / "repair_cpu" / "transcripts").glob("step-000001.txt")]
    assert "exit status 0" in text
    assert "over chat" in text
