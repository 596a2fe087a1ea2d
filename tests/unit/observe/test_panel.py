"""The live panel shows what was measured; off a terminal there are plain lines; every way to end closes the sinks."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from moe_trm.config.schema import Config
from moe_trm.observe.build import open_sinks
from moe_trm.observe.panel import LivePanel, clock, sparkline
from moe_trm.observe.phases import Phases
from moe_trm.observe.sinks import Sink


def config(**observe: object) -> Config:
    return Config.model_validate(
        {"name": "one", "model": {"checkpoint": "nowhere"}, "train": {"steps": 8}, "observe": observe}
    )


def picture(live: LivePanel) -> str:
    shown = io.StringIO()
    Console(file=shown, width=100, force_terminal=False).print(live)
    return shown.getvalue()


def quiet() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def test_figures_phases_and_verdict_are_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    live = LivePanel("my run", 8, quiet())
    metrics: dict[str, float | str] = {
        "reward/mean": 0.625,
        "engine/k3_kl": 2.5e-5,
        "correction/kept_fraction": 0.973,
        "routing/native_flip_rate": 0.0072,
        "weights/version": 1.0,
        "time/wait_s": 4.0,
        "time/update_s": 2.0,
        "verdict": "All is well.",
    }
    for phase in ("step", "wait", "update", "eval"):
        live.enter(phase)
    live.write(1, metrics)
    now[0] = 110.0
    live.write(2, {**metrics, "reward/mean": 0.75, "verdict": "They disagree.", "verdict/config": "replay.mode=R3"})
    live.enter("wait")
    now[0] = 113.0
    shown = picture(live)
    assert "my run" in shown
    assert "step 2/8" in shown
    assert "1 min 00 s left" in shown
    assert "wait 3 s" in shown
    assert "4.00 s" in shown
    assert "2.00 s" in shown
    for figure in ("0.750", "2.5e-05", "97.3%", "0.72%"):
        assert figure in shown
    assert "They disagree. Try replay.mode=R3." in shown
    wait, update = (next(line for line in shown.splitlines() if f"│ {name} " in line) for name in ("wait", "update"))
    assert wait.count("█") == 2 * update.count("█")
    live.close()


def test_what_a_step_did_not_measure_keeps_its_last_value_and_advice_goes() -> None:
    live = LivePanel("my run", 8, quiet())
    live.write(1, {"routing/native_flip_rate": 0.0072, "verdict": "Bad.", "verdict/config": "replay.mode=R3"})
    live.write(2, {"verdict": "Good."})
    shown = picture(live)
    assert "0.72%" in shown
    assert "Try" not in shown
    live.close()


def test_small_parts() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert [clock(seconds) for seconds in (0, 59.4, 60, 3599, 3600, 7500)] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_phases_are_told_when_they_begin() -> None:
    told: list[str] = []

    class Listener(Sink):
        def enter(self, phase: str) -> None:
            told.append(phase)

    phases = Phases([Listener()])
    with phases.time("step"), phases.time("score"):
        pass
    assert told == ["step", "score"]
    assert phases.take().keys() == {"time/step_s", "time/score_s"}


def test_an_interrupted_run_has_its_metrics_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with open_sinks(config(), tmp_path, first_step=0) as sinks:
            for sink in sinks:
                sink.write(1, {"reward/mean": 0.5})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["step"], row["reward/mean"]) == (1, 0.5)
    assert row["time/unix_s"] > 1.7e9
    assert "reward/mean" in (tmp_path / "report.html").read_text()
    said = capsys.readouterr().out
    assert "step 1/8  reward 0.500" in said
    assert f"report: {tmp_path / 'report.html'}" in said


def test_a_run_without_a_finished_step_has_no_report(tmp_path: Path) -> None:
    with open_sinks(config(), tmp_path, first_step=0):
        pass
    assert not (tmp_path / "report.html").exists()


def test_the_panel_is_for_terminals_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_sinks(config(panel="on", report=False), tmp_path, first_step=0) as sinks:
        for sink in sinks:
            sink.write(1, {"reward/mean": 0.5})
    said = capsys.readouterr().out
    assert "0.500" in said
    assert "╭─ one" in said
