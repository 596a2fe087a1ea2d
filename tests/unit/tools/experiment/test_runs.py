"""Runs of an experiment: once each, gone on with after a kill, and failures that stay."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.errors import ConfigError, RunError
from moe_trm.tools.experiment.code import code_version
from moe_trm.tools.experiment.processes import alone
from tests.unit.tools.experiment.scripted import Scripted

ALL = {f"{arm}-seed{seed}" for arm in ("none", "R3") for seed in (0, 1, 2)}


def test_every_arm_runs_with_every_seed_once(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    states = trial.states()
    assert states.keys() == ALL
    assert {(s["state"], s["attempts"], s["steps"], s["exit_status"]) for s in states.values()} == {
        ("finished", 1, 3, 0)
    }
    assert trial.run() == 0
    assert all(trial.starts(run) == [0] for run in ALL), "a finished run was run again"
    assert (trial.out / "report.html").is_file()
    assert (trial.out / "table.md").is_file()


def test_several_at_a_time_come_to_the_same(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run(jobs=4) == 0
    assert {state["state"] for state in trial.states().values()} == {"finished"}


def test_a_killed_run_goes_on_and_the_others_are_left_alone(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"R3-seed1": {"killed_at": 2}})
    assert trial.run() == 0
    killed = trial.states()["R3-seed1"]
    assert (killed["state"], killed["reason"]) == ("stopped", "ended by SIGKILL after step 2")
    assert "2 of 3 runs finished, 1 not finished yet" in (trial.out / "table.md").read_text()
    assert trial.run() == 0
    assert trial.starts("R3-seed1") == [0, 3]
    assert all(trial.starts(run) == [0] for run in ALL - {"R3-seed1"})
    again = trial.states()["R3-seed1"]
    assert (again["state"], again["attempts"], again["reason"]) == ("finished", 2, "")
    assert again["earlier"] == ["ended by SIGKILL after step 2"]


def test_what_ran_when_the_experiment_was_killed_goes_on(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"none-seed1": {"killed_at": 1}})
    trial.run()
    path = trial.out / "states.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["run"] == "none-seed1":
            line |= {"state": "running", "reason": ""}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trial.run() == 0
    assert trial.starts("none-seed1") == [0, 2]
    assert trial.states()["none-seed1"]["earlier"] == ["the experiment ended while it ran"]


def test_asked_to_stop_it_begins_no_further_run_and_passes_it_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"R3-seed0": {"stops_all_at": 1}})
    assert trial.run() == 143
    states = trial.states()
    assert (states["R3-seed0"]["state"], states["R3-seed0"]["reason"]) == ("stopped", "ended by SIGTERM after step 1")
    assert [states[run]["state"] for run in ("none-seed0", "none-seed1")] == ["finished", "waiting"]
    assert "asked to stop" in capfd.readouterr().out
    assert trial.run() == 0
    assert {state["state"] for state in trial.states().values()} == {"finished"}


def test_a_failure_is_an_outcome_with_its_reason(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"R3-seed2": {"fails_at": 1}})
    assert trial.run() == 1
    assert trial.run() == 1
    assert trial.starts("R3-seed2") == [0], "a failed run was run again"
    failed = trial.states()["R3-seed2"]
    assert (failed["state"], failed["exit_status"], failed["steps"]) == ("failed", 2, 1)
    assert failed["reason"] == "error: the loss is not finite\n  got:      nan"
    for page in ("report.html", "table.md"):
        text = (trial.out / page).read_text()
        assert "R3: 2 of 3 runs finished, 1 failed" in text
        assert "the loss is not finite" in text


def test_where_the_report_is_is_no_reason(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0])
    trial.tell(
        {"R3-seed0": {"fails_at": 1, "says": "learner rank 0 was ended by SIGKILL\nreport: runs/R3/report.html"}}
    )
    assert trial.run() == 1
    assert trial.states()["R3-seed0"]["reason"] == "learner rank 0 was ended by SIGKILL"


def test_failed_runs_are_repeated_only_when_asked_for_and_the_count_stays(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"R3-seed2": {"fails_at": 1, "times": 1}})
    assert trial.run() == 1
    assert trial.run(retry_failed=True) == 0
    again = trial.states()["R3-seed2"]
    assert (again["state"], again["attempts"]) == ("finished", 2)
    assert again["earlier"] == ["error: the loss is not finite\n  got:      nan"]
    assert "before: error: the loss is not finite" in (trial.out / "table.md").read_text()


def test_final_weights_are_evaluated_once_and_a_failed_evaluation_is_no_new_training(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0], evaluations=["sglang", "learner"])
    trial.tell({"R3-seed0": {"no_evaluation": "learner"}})
    assert trial.run() == 1
    failed = trial.states()["R3-seed0"]
    assert (failed["state"], failed["trained"]) == ("failed", True)
    assert failed["reason"] == "evaluation by learner: error: no weights"
    trial.tell({})
    before = (trial.out / "R3-seed0" / "eval" / "final-sglang.json").stat().st_mtime_ns
    assert trial.run(retry_failed=True) == 0
    assert trial.starts("R3-seed0") == [0], "it was trained again"
    assert (trial.out / "R3-seed0" / "eval" / "final-sglang.json").stat().st_mtime_ns == before
    table = (trial.out / "table.md").read_text()
    assert "| eval/accuracy, final weights by learner | 0.6 (one run) | 0.6 (one run) |" in table
    assert "| eval/accuracy, final weights by sglang | 0.7 (one run) | 0.7 (one run) |" in table


def test_asked_to_stop_in_the_training_a_run_is_evaluated_later(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0], evaluations=["learner"])
    trial.tell({"none-seed0": {"stops_all_at": 3}})
    assert trial.run() == 143
    state = trial.states()["none-seed0"]
    assert (state["state"], state["reason"]) == ("stopped", "ended by SIGTERM after step 3")
    assert trial.run() == 0
    assert trial.states()["none-seed0"]["state"] == "finished"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"unmeasured": True}, "it never measured eval/accuracy"),
        ({"ends_early_at": 1}, "it ended after step 1 of 3"),
        ({"accuracy": None}, "eval/accuracy was not finite at step 3"),
    ],
)
def test_a_run_that_ends_well_without_a_result_has_failed(tmp_path: Path, told: dict[str, object], reason: str) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"none-seed1": told})
    assert trial.run() == 1
    state = trial.states()["none-seed1"]
    assert (state["state"], state["reason"], state["exit_status"]) == ("failed", reason, 0)


def test_a_changed_file_is_refused_with_what_changed(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    trial.write(arms={"none": ["replay.mode=none"], "R3": ["replay.mode=R3", "optimizer.lr=1e-3"]}, steps=4)
    with pytest.raises(ConfigError, match="begun with other settings") as refused:
        trial.run()
    assert "steps: 3 -> 4" in str(refused.value)
    assert re.search(r"arms\.R3\.optimizer\.lr: \S+ -> 0\.001", str(refused.value))
    assert trial.run(out=tmp_path / "elsewhere") == 0
    trial.write()
    assert trial.run() == 0, "the file as it was is accepted"


def test_a_changed_base_is_refused_too(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0])
    assert trial.run() == 0
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + "optimizer: {lr: 0.5}\n")
    with pytest.raises(ConfigError, match=r"arms\.none\.optimizer\.lr: \S+ -> 0\.5"):
        trial.run()


def test_an_arm_may_change_until_its_first_run_and_the_page_says_so(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run(arms=["none"]) == 0
    assert "What changed" not in (trial.out / "table.md").read_text()
    arms = {"none": ["replay.mode=none"], "R3": ["replay.mode=R3", "optimizer.lr=1e-3"]}
    trial.write(arms=arms)
    assert trial.run() == 0
    for page in ("table.md", "report.html"):
        text = (trial.out / page).read_text()
        assert "What changed after the first run" in text
        assert re.search(r"R3\D+optimizer\.lr\D+\S+.*0\.001", text)
    assert trial.run() == 0, "a change is told once, and is no change any more"
    assert (trial.out / "table.md").read_text().count("| optimizer.lr |") == 2, "among the changes and what sets apart"
    trial.write(arms=arms | {"R3": ["replay.mode=R3", "optimizer.lr=2e-3"]})
    with pytest.raises(ConfigError, match=r"arms\.R3\.optimizer\.lr: 0\.001 -> 0\.002"):
        trial.run()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 4},
        {"primary_metric": "reward/mean"},
        {"seeds": [0, 1]},
        {"baseline": "R3"},
        {"overrides": ["optimizer.lr=1e-3"]},
    ],
)
def test_what_concerns_all_arms_is_fixed_by_the_first_run_of_any(tmp_path: Path, change: dict[str, object]) -> None:
    trial = Scripted(tmp_path)
    assert trial.run(arms=["R3"]) == 0
    trial.write(**change)
    with pytest.raises(ConfigError, match="begun with other settings"):
        trial.run()


def test_a_setting_that_a_newer_version_added_stands_at_its_default(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0])
    assert trial.run() == 0
    path = trial.out / "experiment.json"
    document = json.loads(path.read_text())
    older = {key: value for key, value in document["settings"].items() if not key.endswith(".probe.tokens")}
    assert len(older) == len(document["settings"]) - 2
    path.write_text(json.dumps(document | {"settings": older}))
    assert trial.run() == 0
    assert re.search(r"\| none, R3 \| probe\.tokens \| \(absent\) \| \d+ \|", (trial.out / "table.md").read_text())
    path.write_text(json.dumps(document | {"settings": older}))
    (tmp_path / "base.yaml").write_text((tmp_path / "base.yaml").read_text() + "probe: {tokens: 77}\n")
    with pytest.raises(ConfigError, match=r"arms\.none\.probe\.tokens: \(absent\) -> 77"):
        trial.run()


def test_each_run_says_which_code_it_is_of(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0])
    assert trial.run() == 0
    assert {state["code"] for state in trial.states().values()} == {code_version()}
    assert code_version() in (trial.out / "table.md").read_text()
    path = trial.out / "states.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "code"}) + "\n" for line in lines))
    assert trial.run() == 0
    assert (trial.out / "table.md").read_text().count("not recorded") == len(lines)


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    with alone(trial.out), pytest.raises(RunError, match="another process"):
        trial.run()
    assert not (trial.out / "states.jsonl").exists()
    assert trial.run() == 0


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    with pytest.raises(RunError, match="has not begun"):
        trial.run(only_report=True)
    assert not trial.out.exists()


def test_damaged_books_are_refused(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, seeds=[0])
    assert trial.run() == 0
    (trial.out / "states.jsonl").write_text('{"run": "none-seed0"')
    with pytest.raises(RunError, match="cannot be read"):
        trial.run()


def test_arms_can_be_run_before_the_others(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run(arms=["R3"]) == 0
    assert {run: state["state"] for run, state in trial.states().items()} == {
        run: "finished" if run.startswith("R3") else "waiting" for run in ALL
    }
    assert "no seed has finished in both" in (trial.out / "table.md").read_text()
    assert trial.run() == 0
    assert {state["attempts"] for state in trial.states().values()} == {1}
    with pytest.raises(ConfigError, match="no arm of the experiment"):
        trial.run(arms=["R4"])


def test_seeds_can_be_run_before_the_others(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run(seeds=[2]) == 0
    assert {run for run, state in trial.states().items() if state["state"] == "finished"} == {
        run for run in ALL if run.endswith("seed2")
    }
    with pytest.raises(ConfigError, match="no seed of the experiment"):
        trial.run(seeds=[77])


STOPPED = """
import sys, time
from moe_trm import cli
from moe_trm.tools.experiment import commands
from launch.job import Signals
def runs(*_, **__):
    with Signals() as signals:
        signals.begin()
        print("begun", flush=True)
        while not signals.first:
            time.sleep(0.01)
        print("asked to stop", flush=True)
    return 128 + signals.first
commands.run_experiment = runs
sys.exit(cli.main(["experiment", "file.yaml"]))
"""


def test_a_stop_is_answered_though_nobody_reads_the_output() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"begun\n"
        running.stdout.close()
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM
