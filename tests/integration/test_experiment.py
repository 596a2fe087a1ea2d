"""The shipped experiment with real engines, cut down to 2 arms x 2 seeds x 2 steps: killed, and with shared parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from moe_trm.run_folder.run import read_run
from tests.integration.jobs import metrics_of, still_running

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "task.max_digits=1",
    "task.eval_size=16",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "rollout.server.max_total_tokens=8192",
    "rollout.server.max_running_requests=32",
    "learner.parallel={}",
    "train.eval_every=0",
    "checkpoint.every=1",
]
PATIENCE_S = 600
"""For one run; generous, as the machine may be busy."""


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one-server"])
def test_killed_in_the_middle_an_experiment_goes_on(brief_checkpoint: Path, tmp_path: Path, shared: bool) -> None:
    file, out = small_experiment(brief_checkpoint, tmp_path, seeds=[0, 1], shared_server=shared)
    command = [sys.executable, "-m", "moe_trm", "experiment", str(file)]

    begun = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    killed = out / "R3-seed0"
    while not any(row["step"] == 1 for row in (metrics_of(killed) if (killed / "metrics.jsonl").exists() else [])):
        assert begun.poll() is None, (out / "logs" / "R3-seed0.log").read_text()[-4000:]
        time.sleep(0.05)
    family = psutil.Process(begun.pid).children(recursive=True)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    assert not still_running(family, 60), "runs outlive their experiment"
    assert [state["state"] for state in states_of(out)] == ["finished", "running", "waiting", "waiting"]
    first = (out / "none-seed0" / "metrics.jsonl").stat().st_mtime_ns

    done = subprocess.run(command, cwd=REPOSITORY, timeout=4 * PATIENCE_S, check=False)
    assert done.returncode == 0
    states = {state["run"]: state for state in states_of(out)}
    assert {run: state["attempts"] for run, state in states.items()} == {
        "none-seed0": 1, "R3-seed0": 2, "none-seed1": 1, "R3-seed1": 1,
    }  # fmt: skip
    assert all((state["state"], state["steps"]) == ("finished", 2) for state in states.values())
    assert (out / "none-seed0" / "metrics.jsonl").stat().st_mtime_ns == first
    for run in states:
        assert [row["step"] for row in metrics_of(out / run)] == [0, 1, 2]
    assert all(row["replay/applied_fraction"] == 1.0 for row in read_run(out / "R3-seed1").rows[1:])
    table = (out / "table.md").read_text()
    assert "no claim is possible with 2 seeds" in table
    assert "before: the experiment ended while it ran" in table
    assert (out / "report.html").is_file()
    for run in states:
        assert (out / run / "rollout.log").exists() is not shared


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)
def test_runs_share_one_server(brief_checkpoint: Path, tmp_path: Path) -> None:
    """Each run begins with the weights of the start, whatever the run before left in the server."""
    file, out = small_experiment(brief_checkpoint, tmp_path, seeds=[0], shared_server=True)
    command = [sys.executable, "-m", "moe_trm", "experiment", str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0
    assert [state["state"] for state in states_of(out)] == ["finished", "finished"]
    assert not list(out.glob("*/rollout.log")), "a run started a server of its own"
    for run in ("none-seed0", "R3-seed0"):
        rows = metrics_of(out / run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert "1 learner rank," in (out / "logs" / f"{run}.log").read_text()
    first, second = (metrics_of(out / run)[0] for run in ("none-seed0", "R3-seed0"))
    assert first["eval/accuracy"] == second["eval/accuracy"]


def small_experiment(checkpoint: Path, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """The file of the shipped experiment, cut down, and the folder of its results."""
    content = yaml.safe_load((REPOSITORY / "examples" / "experiments" / "replay_modes.yaml").read_text())
    content |= {"steps": 2, "run_dir": str(folder), **changes}
    content["overrides"] += [*SMALL, f"model.checkpoint={checkpoint}"]
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file, folder / "replay_modes"


def states_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "states.jsonl").read_text().splitlines()]
