"""One server for all runs of an experiment: started once and only if a run is left, reached by every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_trm.errors import ConfigError, MoeTrmError
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun, make_plan
from moe_trm.tools.experiment.shared_server import SharedServer
from moe_trm.tools.experiment.stages import stages
from tests.unit.tools.experiment.scripted import Scripted, passes

URL, KEY = "http://127.0.0.1:31234", "a-secret"


class Lent:
    """Servers that were started and ended."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    @contextmanager
    def serve(self, plan: ExperimentPlan) -> Iterator[SharedServer]:
        self.begun += 1
        yield SharedServer(URL, KEY)
        self.ended += 1


def test_every_run_uses_the_one_server_and_it_ends_with_the_last(tmp_path: Path) -> None:
    trial, is_released = Scripted(tmp_path, shared_server=True), Lent()
    trial.tell({"none-seed1": {"killed_at": 1}})
    assert trial.run(served_by=is_released.serve) == 0
    assert (is_released.begun, is_released.ended) == (1, 1)
    assert all(trial.servers(run) == [f"{URL} {KEY}"] for run in trial.states())
    trial.run(served_by=is_released.serve)
    assert is_released.begun == 2
    assert trial.servers("none-seed1") == [f"{URL} {KEY}"] * 2
    trial.run(served_by=is_released.serve)
    assert is_released.begun == 2, "a server was started for no run"
    assert KEY not in (trial.out / "experiment.json").read_text() + (trial.out / "states.jsonl").read_text()


def test_without_it_runs_start_their_own(tmp_path: Path) -> None:
    trial, is_released = Scripted(tmp_path), Lent()
    assert trial.run(served_by=is_released.serve) == 0
    assert not is_released.begun
    assert trial.servers("R3-seed2")[0].startswith("None")


def test_an_experiment_may_change_to_a_shared_server_and_back(tmp_path: Path) -> None:
    trial, is_released = Scripted(tmp_path), Lent()
    trial.tell({"R3-seed2": {"killed_at": 1}})
    trial.run()
    trial.write(shared_server=True)
    assert trial.run(served_by=is_released.serve) == 0
    assert trial.servers("R3-seed2")[1] == f"{URL} {KEY}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": ["rollout.url=http://127.0.0.1:30100"]}, "got they start none"),
        ({"overrides": ["sync.method=distributed"]}, "got sync.method=distributed"),
        (
            {"arms": {"a": [], "b": ["rollout.server.dtype=float32"]}},
            "arm b needs another server than a - got rollout.server.dtype=float32",
        ),
    ],
)
def test_what_cannot_share_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    trial = Scripted(tmp_path, shared_server=True, **changes)
    with pytest.raises(MoeTrmError) as refused:
        trial.run(served_by=Lent().serve)
    assert message in str(refused.value)


def test_runs_at_a_time_would_push_to_one_server(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, shared_server=True)
    with pytest.raises(ConfigError, match="share a server"):
        trial.run(jobs=2, served_by=Lent().serve)


def test_training_and_evaluation_attach_before_the_options(tmp_path: Path) -> None:
    trial = Scripted(tmp_path, evaluations=["sglang"])
    plan = make_plan(trial.file, check=passes)
    run = PlannedRun("R3", 0, ("seed=0",), server=URL)
    train, evaluation = (list(stage.command) for stage in stages(plan, run))
    attach = f"rollout.url={URL}"
    assert train[-2:] == ["seed=0", attach]
    place = evaluation.index(attach)
    assert place < evaluation.index("--by")
