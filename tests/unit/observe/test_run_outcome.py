"""The end of a run in its folder: what failed, at which step, and what the report and the panel make of it."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected, RunError
from moe_trm.observe.build import open_sinks
from moe_trm.observe.panel import LivePanel
from moe_trm.observe.report.page import render
from moe_trm.run_folder.run import read_run
from moe_trm.run_folder.run_end import LEARNER_LOCK, RunEnd, outcome, read_end, record_failure, write_end
from moe_trm.runtime.lock import held_alone
from tests.unit.observe.report.made_run import make_run, metrics_of


def config() -> Config:
    return Config.model_validate({"model": {"checkpoint": "m"}, "train": {"steps": 3}, "observe": {"transcripts": 0}})


def end_of(run_dir: Path, steps: int, error: Exception | None = None) -> RunEnd:
    """Of a run that ends after `steps` steps, in the phase `update` of the next one where it fails."""

    def live() -> None:
        with open_sinks(config(), run_dir, first_step=0) as sinks:
            end = read_end(run_dir)
            assert end is not None
            assert end.state == "running"
            for step in range(1, steps + 1):
                for sink in sinks:
                    sink.write(step, metrics_of(step))
            if error is not None:
                for sink in sinks:
                    sink.enter("update")
                raise error

    if error is None:
        live()
    else:
        with pytest.raises(type(error)):
            live()
    end = read_end(run_dir)
    assert end is not None
    return end


@pytest.mark.parametrize(("steps", "state", "said"), [(3, "finished", "complete"), (2, "stopped", "stopped as asked")])
def test_a_run_that_ends_well(tmp_path: Path, steps: int, state: str, said: str) -> None:
    end = end_of(tmp_path, steps)
    assert (end.state, end.step, end.failure) == (state, steps, None)
    assert outcome(tmp_path, complete=steps == 3) == (said, "")
    assert 'class="warning failure"' not in (tmp_path / "report.html").read_text()


def test_the_reason_of_a_death_is_at_the_top_of_the_report(tmp_path: Path) -> None:
    error = RecordRejected("misaligned", "the routes are <another> sample's", where="sample 17, layer 2", got=0.9)
    end = end_of(tmp_path, 2, error)
    assert (end.state, end.step) == ("failed", 2)
    failure = end.failure
    assert failure is not None
    assert (failure.kind, failure.step, failure.phase, failure.rank) == ("RecordRejected", 3, "update", 0)
    assert "sample 17, layer 2" in failure.told
    page = (tmp_path / "report.html").read_text()
    top = page[: page.index("</header>")]
    assert "step 2" in top
    assert ": failed" in top
    assert "RecordRejected (step 3, update, rank 0): the routes are &lt;another&gt; sample&#x27;s (sample 17" in top
    assert 'class="warning failure"' in top


def test_an_error_of_another_rank_is_not_hidden_by_the_connection_that_it_broke(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=8, done=3)
    write_end(tmp_path / "run", RunEnd("running", 3, time.time()))
    record_failure(tmp_path / "run", KeyError("of rank 1"), rank=1)
    record_failure(tmp_path / "run", RuntimeError("connection closed by peer"), step=4, rank=0)
    record_failure(tmp_path / "run", "learner rank 0 ended with exit code 1")
    _, trouble = outcome(tmp_path / "run", complete=False)
    assert trouble == "KeyError (step 4, rank 1): 'of rank 1'"


def test_a_run_that_never_began_keeps_no_failure(tmp_path: Path) -> None:
    record_failure(tmp_path, "the rollout server ended")
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8, done=3)
    write_end(run, RunEnd("running", 3, time.time()))
    with held_alone(run / LEARNER_LOCK, "trains"):
        assert outcome(run, complete=False) == ("running", "")
    assert outcome(run, complete=False)[0] == "ended without a word"
    assert "killed, or their machine went down" in render([read_run(run)])


def test_a_failure_before_the_first_step_is_told_in_place_of_a_report(tmp_path: Path) -> None:
    end_of(tmp_path, 0, RuntimeError("the model does not fit"))
    with pytest.raises(RunError, match=r"the run failed: RuntimeError \(step 1, update, rank 0\): the model does not"):
        read_run(tmp_path)


def test_the_panel_ends_in_red() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
    live = LivePanel("run", 3, console)
    live.enter("update")
    live.failed(RuntimeError("sample 17 is wrong"))
    live.close()
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "\x1b[1;31mRuntimeError: sample 17 is wrong" in drawn
