"""Experiment trackers with their real libraries, offline; what is not installed is skipped."""

from __future__ import annotations

import ast
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.observe import trackers
from moe_trm.observe.sinks import Guarded, Sink
from moe_trm.observe.trackers import TrackedRun, check_trackers, open_tracker

ROWS: list[dict[str, float | str]] = [
    {"eval/accuracy": 0.125},
    {"engine/k3_kl": 1.2345678901234567e-5, "verdict": "All is well."},
    {"engine/k3_kl": 0.2, "verdict": "They disagree.", "verdict/config": "replay.mode=R3", "nothing": math.nan},
]


def config(*sinks: str) -> Config:
    return Config.model_validate(
        {
            "name": "watched",
            "model": {"checkpoint": "nowhere"},
            "rollout": {"api_key": "not to be told"},
            "observe": {"sinks": list(sinks)},
        }
    )


def run(folder: Path) -> TrackedRun:
    return TrackedRun("watched", "moe-trm", config().dump(), folder)


def feed(sink: Sink) -> None:
    for step, row in enumerate(ROWS):
        sink.enter("update")
        sink.write(step, row)
    sink.close()


def test_tensorboard_has_every_number_and_each_new_verdict(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    feed(open_tracker("tensorboard", run(tmp_path)))
    # Its reader has deprecation warnings of its own, which are errors here.
    script = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path / "tensorboard")!r})
events.Reload()
for tag in events.Tags()["scalars"]:
    print(tag, [(e.step, e.value) for e in events.Scalars(tag)])
print([e.step for e in events.Tensors("verdict/text_summary")])
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(" ", 1) for line in said.splitlines()[:-1])
    assert lines.keys() == {"eval/accuracy", "engine/k3_kl"}
    first, second = ast.literal_eval(lines["engine/k3_kl"])
    assert first == (1, pytest.approx(ROWS[1]["engine/k3_kl"], rel=1e-6))
    assert second == (2, pytest.approx(0.2, rel=1e-6))
    assert said.splitlines()[-1] == "[1, 2]"
    written = list((tmp_path / "tensorboard").iterdir())
    assert any(b"engine/k3_kl" in path.read_bytes() for path in written)
    assert all(b"not to be told" not in path.read_bytes() for path in written)


_OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
    "trackio": {"TRACKIO_DIR": "trackio"},
}


@pytest.mark.parametrize("name", _OFFLINE)
def test_other_trackers_take_a_run_offline(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = f"""
from pathlib import Path
from tests.unit.observe.test_trackers import feed, run
from moe_trm.observe.trackers import open_tracker
feed(open_tracker({name!r}, run(Path({str(tmp_path)!r}))))
"""
    environment = {**os.environ, **_OFFLINE[name], "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=120)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"watched" in path.read_bytes() for path in kept)
    assert all(b"not to be told" not in path.read_bytes() for path in kept)


def test_a_missing_library_is_refused_at_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-trm\[wandb,trackio\]'"):
        check_trackers(config("wandb", "trackio").observe)


def test_a_tracker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: TrackedRun) -> Sink:
        raise PermissionError("no account")

    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": refuse})
    with pytest.raises(ConfigError, match="no account"):
        open_tracker("wandb", run(tmp_path))


class Failing(Sink):
    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self.calls += 1
        raise ConnectionError("the tracker is away")


def test_a_failing_sink_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    with caplog.at_level(logging.WARNING):
        feed(Guarded(failing, "wandb"))
    assert failing.calls == 1
    assert len(caplog.records) == 1
    assert "wandb" in caplog.text
    assert "the tracker is away" in caplog.text
