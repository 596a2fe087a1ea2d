"""Refusals of an experiment: before the first run, all at once, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, MoeTrmError
from moe_trm.tools.experiment.commands import run_experiment
from moe_trm.tools.experiment.plan import make_plan
from tests.unit.tools.experiment.scripted import Scripted, passes

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": [0]}, "seed: unknown key of an experiment; did you mean seeds?"),
    ({"replay": {"mode": "R3"}}, "replay: unknown key of an experiment; known here: name, base"),
    ({"steps": None}, "steps: required and missing"),
    ({"steps": "many"}, "steps: bad value - got 'many'"),
    ({"steps": 0}, "steps: bad value - got 0"),
    ({"seeds": [0, 1, 0]}, "seeds: a seed that is given twice is no second observation - got 0 more than once"),
    ({"repeated_seeds": [7]}, "repeated_seeds: each is a seed of the experiment that the baseline runs once more"),
    ({"repeated_seeds": [0, 0]}, "repeated_seeds: each is a seed of the experiment"),
    ({"seeds": []}, "seeds: there is nothing to run"),
    ({"seeds": [-1]}, "seeds.0: bad value - got -1"),
    ({"seeds": [True]}, "seeds.0: bad value"),
    ({"arms": {}}, "arms: there is nothing to run"),
    ({"arms": {"a/b": []}}, "arms: this name becomes a folder - got 'a/b'"),
    ({"name": "../elsewhere"}, "name: this name becomes a folder"),
    ({"baseline": "R2"}, "baseline: no arm has this name - got R2, expected none or R3"),
    ({"arms": {"a": ["seed=3"]}}, "seed is set by the experiment itself - got seed=3, expected seeds lists them"),
    ({"overrides": ["train.steps=3"]}, "overrides: train.steps is set by the experiment itself"),
    ({"overrides": ["replay"]}, "overrides: malformed override - got 'replay'"),
    ({"overrides": ["record.bundle=here"]}, "record.bundle: all runs would share this folder - got here"),
    ({"arms": {"a": ["replay.mode=R4"]}}, "arm a is refused: configuration refused"),
    ({"arms": {"a": ["replay.mod=R3"]}}, "replay.mod: unknown key; did you mean replay.mode?"),
    ({"arms": {"a": ["replay.mode=R3"], "b": ["replay.mode=R3"]}}, "arms: b and a differ by name only"),
    ({"arms": {"a": [], "b": ["rollout.server.port=31000"]}}, "rollout.server.port is set by the experiment"),
    ({"base": "no/such.yaml"}, "configuration file not found"),
    ({"primary_metric": "eval/acuracy"}, "no run of these settings writes this metric - got eval/acuracy, expected"),
    ({"primary_metric": "eval/pass_at_8"}, "no run of these settings writes this metric"),
    ({"primary_metric": "engine/k9_kl"}, "got engine/k9_kl, expected engine/k3_kl"),
    ({"evaluations": ["trtllm"]}, "evaluations: no such rollout engine - got trtllm"),
    ({"evaluations": ["learner", "learner"]}, "evaluations: given twice"),
    (
        {"evaluations": ["learner"], "overrides": ["train.export=false", "checkpoint.every=0"]},
        "evaluations: runs of arm none leave no weights to evaluate",
    ),
    ({"overrides": ["task.eval_size=0"]}, "primary_metric: these runs evaluate on nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    trial = Scripted(tmp_path, **changes)
    with pytest.raises(MoeTrmError) as refused:
        trial.run()
    assert message in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_an_arm_given_twice_is_refused(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.file.write_text(trial.file.read_text().replace("  none:", "  R3:"))
    with pytest.raises(ConfigError, match="R3"):
        trial.run()


@pytest.mark.parametrize(
    ("metric", "overrides"),
    [
        ("eval/accuracy", []),
        ("eval/pass_at_8", ["eval.samples=8"]),
        ("reward/mean", []),
        ("engine/k3_kl", ["task.eval_size=0"]),
        ("acceptance/length_17_64", []),
        ("correction/icepop/kept_fraction", ["correction.rules=[{name: icepop}]"]),
    ],
)
def test_metrics_that_runs_write_are_accepted(tmp_path: Path, metric: str, overrides: list[str]) -> None:
    trial = Scripted(tmp_path, primary_metric=metric, overrides=overrides)
    assert make_plan(trial.file, None, passes).file.primary_metric == metric


def test_all_arms_are_checked_and_told_together(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    seen: list[tuple[str, int]] = []

    def check(config: Config, ranks: int) -> None:
        seen.append((config.replay.mode, ranks))
        raise ConfigError(f"no room for {config.replay.mode}")

    with pytest.raises(ConfigError) as refused:
        run_experiment(trial.file, check=check)
    assert seen == [("none", 1), ("R3", 1)]
    assert "arm none is refused: no room for none" in str(refused.value)
    assert "arm R3 is refused: no room for R3" in str(refused.value)


def test_the_command_makes_the_checks_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Scripted(tmp_path)
    assert main(["experiment", str(trial.file), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "arm none is refused" in said
    assert "a/model" in said


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Scripted(tmp_path, seeds=[0, 1])
    assert trial.run(dry_run=True, jobs=2) == 0
    said = capsys.readouterr().out
    assert "2 arms x 2 seeds = 4 runs of 3 steps, 2 at a time" in said
    assert "primary metric: eval/accuracy, every arm against none" in said
    assert "arm R3: replay.mode=R3 (not none)" in said
    assert "R3-seed1: waiting" in said
    assert "with fewer than 3 seeds no claim will be possible" in said
    assert not (tmp_path / "runs").exists()


def test_runs_of_one_server_are_not_run_at_a_time(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, overrides=["rollout.url=http://127.0.0.1:31000", "rollout.api_key=key"])
    with pytest.raises(ConfigError, match="same servers"):
        trial.run(jobs=2)
    with pytest.raises(ConfigError, match="at least one"):
        trial.run(jobs=0)


def test_the_shipped_example_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[4])
    plan = make_plan("examples/experiments/replay_modes.yaml", None, passes)
    assert [run.name for run in plan.runs][:3] == ["none-seed0", "R3-seed0", "none-seed1"]
    assert plan.apart("R3") == {"replay.mode": ("none", "R3")}
