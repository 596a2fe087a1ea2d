"""Runs as forks of one process: the same books, whatever happens to a run or to that process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moe_trm.errors import MoeTrmError
from moe_trm.experiment.plan import ExperimentPlan, PlannedRun, make_plan
from moe_trm.experiment.stages import stages
from moe_trm.runtime.warm import WarmServer
from tests.unit.experiment.scripted import Scripted, passes
from tests.unit.experiment.test_shared_server import KEY, URL, Lent

ROOT = Path(__file__).parents[3]


def light(plan: ExperimentPlan) -> WarmServer:
    """Without imports: the runs are small programs."""
    return WarmServer(
        "tests.unit.runtime.light_server", environment={"PYTHONPATH": str(ROOT)}, log=plan.folder / "warm.log"
    )


def test_trainings_are_forks_of_one_process_and_the_outcomes_the_same(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, warm_ranks=True, evaluations=["learner"])
    trial.tell({"none-seed1": {"fails_at": 1}, "R3-seed0": {"killed_at": 2}})
    assert trial.run(warmed_by=light) == 1
    states = trial.states()
    assert states["none-seed1"]["state"] == "failed"
    assert states["none-seed1"]["reason"].startswith("error: the loss is not finite")
    assert (states["R3-seed0"]["state"], states["R3-seed0"]["reason"]) == ("stopped", "ended by SIGKILL after step 2")
    assert {states[run]["state"] for run in ("none-seed0", "R3-seed1", "none-seed2", "R3-seed2")} == {"finished"}
    assert "begins at 0" in (trial.out / "logs" / "R3-seed2.log").read_text()
    parents = {parent for run in states for parent in trial.parents(run)}
    assert len(parents) == 1
    assert os.getpid() not in parents

    assert trial.run(warmed_by=light, retry_failed=True) == 0
    assert trial.starts("R3-seed0") == [0, 3]
    assert trial.states()["R3-seed0"]["state"] == "finished"


def test_several_at_a_time_share_it(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, warm_ranks=True)
    assert trial.run(jobs=4, warmed_by=light) == 0
    assert {state["state"] for state in trial.states().values()} == {"finished"}
    assert len({parent for run in trial.states() for parent in trial.parents(run)}) == 1


def test_with_it_a_server_is_shared_too(tmp_path: Path) -> None:
    trial, lent = Scripted(tmp_path, warm_ranks=True, shared_server=True), Lent()
    assert trial.run(warmed_by=light, served_by=lent.serve) == 0
    assert all(trial.servers(run) == [f"{URL} {KEY}"] for run in trial.states())


def test_asked_to_stop_the_running_one_saves_and_no_other_begins(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, warm_ranks=True)
    trial.tell({"R3-seed0": {"stops_all_at": 1, "experiment": os.getpid()}})
    assert trial.run(warmed_by=light) == 143
    states = trial.states()
    assert (states["R3-seed0"]["state"], states["R3-seed0"]["reason"]) == ("stopped", "ended by SIGTERM after step 1")
    assert [states[run]["state"] for run in ("none-seed0", "none-seed1")] == ["finished", "waiting"]
    assert trial.run(warmed_by=light) == 0


def test_when_that_process_dies_its_run_is_stopped_and_the_next_has_another(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, warm_ranks=True)
    trial.tell({"R3-seed0": {"kills_parent_at": 1}})
    assert trial.run(warmed_by=light) == 0
    states = trial.states()
    assert (states["R3-seed0"]["state"], states["R3-seed0"]["reason"]) == ("stopped", "ended by SIGKILL after step 1")
    assert {state["state"] for run, state in states.items() if run != "R3-seed0"} == {"finished"}
    assert len({parent for run in states for parent in trial.parents(run)}) == 2
    assert trial.run(warmed_by=light) == 0
    assert trial.states()["R3-seed0"]["state"] == "finished"


def test_an_experiment_may_change_to_it_and_back(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    trial.tell({"R3-seed2": {"killed_at": 1}})
    trial.run()
    trial.write(warm_ranks=True)
    assert trial.run(warmed_by=light) == 0
    assert trial.starts("R3-seed2") == [0, 2]


def test_on_cuda_it_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Scripted(tmp_path, warm_ranks=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MoeTrmError, match="ranks on CUDA cannot be forked"):
        trial.run(warmed_by=light)
    assert not trial.out.exists()
    trial.write()
    make_plan(trial.file, check=passes)


def test_the_training_alone_is_told_of_it(tmp_path: Path) -> None:
    plan = make_plan(Scripted(tmp_path, evaluations=["learner"]).file, check=passes)
    training, evaluation = (
        list(stage.command) for stage in stages(plan, PlannedRun("R3", 0, ("seed=0",), warm="a/socket"))
    )
    assert training[-2:] == ["--warm-ranks", "a/socket"]
    assert "a/socket" not in evaluation
