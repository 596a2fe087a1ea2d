"""A run's folder as its history: what a start may change, what it writes down, and what is never rewritten."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.flat import flatten
from moe_trm.config.schema import Config
from moe_trm.errors import REFUSED, RunError
from moe_trm.run_folder.history import begin, differences, is_done
from moe_trm.run_folder.run_end import RunEnd, State, read_end, write_end

STEPS = 4


def settings(**sections: Any) -> dict[str, Any]:
    given = {"model": {"checkpoint": "unused"}, **sections}
    return Config.model_validate({**given, "train": {"steps": STEPS, **given.get("train", {})}}).dump()


def begun(folder: Path, state: State = "running", step: int = 2) -> Path:
    """The folder of a run that has done `step` steps."""
    assert begin(folder, settings(), first_step=0, branched=None) == []
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {each}}}\n' for each in range(step + 1)))
    write_end(folder, RunEnd(state, step, time.time()))
    return folder


def test_every_other_setting_counts() -> None:
    """Each by itself: all that a start may change are places, processes, and what a run shows and leaves behind."""
    saved = flatten(settings())
    free = {key for key in saved if not differences(saved, {**saved, key: "another"})}
    server = {key for key in free if key.startswith("rollout.server.")}
    assert {key.rpartition(".")[2] for key in server} == {
        *("host", "port", "startup_timeout_s", "max_restarts", "silence_timeout_s", "hang_timeout_s")
    }
    assert {key for key in free - server if not key.startswith(("checkpoint.", "record.", "sync.", "observe."))} == {
        *("name", "run_dir", "rollout.url", "rollout.urls", "rollout.router", "rollout.api_key"),
        *("train.eval_every", "train.export", "train.export_form", "train.max_restarts"),
    }


FREE: list[dict[str, Any]] = [
    {},
    {"name": "other"},
    {"checkpoint": {"every": 7, "keep": 1}},
    {"observe": {"panel": "off", "sinks": ["wandb"]}},
    {"rollout": {"url": "http://127.0.0.1:1"}},
    {"rollout": {"server": {"port": 1, "startup_timeout_s": 5.0}}},
    {"train": {"eval_every": 3, "max_restarts": 2, "export": False}},
]
HISTORY: list[tuple[dict[str, Any], str]] = [
    ({"replay": {"mode": "none"}}, "replay.mode: auto -> none"),
    ({"optimizer": {"lr": 0.5}}, "optimizer.lr: 0.0001 -> 0.5"),
    ({"train": {"steps": 9}}, "train.steps: 4 -> 9"),
    ({"rollout": {"server": {"dtype": "float32"}}}, "rollout.server.dtype: bfloat16 -> float32"),
    ({"task": {"reward_weights": {"style": 2.0}}}, "task.reward_weights.style: (absent) -> 2.0"),
]


@pytest.mark.parametrize("changed", FREE)
def test_place_processes_and_views_may_change(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert not is_done(begun(tmp_path), settings(**changed))


@pytest.mark.parametrize(("changed", "told"), HISTORY)
def test_other_settings_need_a_flag_and_are_written_down(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    run = begun(tmp_path)
    before = (run / "config.json").read_bytes()
    with pytest.raises(RunError, match="began with other settings") as refused:
        is_done(run, settings(**changed))
    assert refused.value.got == told or told in str(refused.value.got)
    assert refused.value.exit_status == REFUSED
    assert "checkpoint.allow_changes=true" in str(refused.value)
    assert (run / "config.json").read_bytes() == before
    now = settings(**changed, checkpoint={"allow_changes": True})
    assert not is_done(run, now)
    assert told in map(str, begin(run, now, first_step=2, branched=None))
    lines = [json.loads(line) for line in (run / "settings.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {2}
    assert any(told.startswith(f"{line['key']}: ") for line in lines)
    assert json.loads((run / "config.json").read_text()) == now
    assert begin(run, now, first_step=2, branched=None) == [], "the next start changes nothing"
    assert not is_done(run, settings(**changed)), "and needs no flag"


def test_a_start_that_measured_nothing_is_no_history(tmp_path: Path) -> None:
    begin(tmp_path, settings(), first_step=0, branched=None)
    assert not is_done(tmp_path, settings(optimizer={"lr": 0.5}))


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, False),
        ({"replay": {"mode": "none"}, "train": {"steps": 2}}, True),
        ({"replay": {"mode": "none"}, "checkpoint": {"allow_changes": True}}, True),
        ({"train": {"steps": 9}}, True),
        ({"checkpoint": {"resume": "checkpoints/step-000002"}}, True),
    ],
)
def test_a_finished_run_is_not_rewritten(tmp_path: Path, changed: dict[str, Any], refused: bool) -> None:
    run = begun(tmp_path, "finished", STEPS)
    if not refused:
        assert is_done(run, settings(**changed))
        return
    with pytest.raises(RunError) as told:
        is_done(run, settings(**changed))
    assert any(word in str(told.value) for word in ("all its 4 steps are done", "began with other settings"))


def test_a_finished_run_goes_on_with_more_steps_where_that_is_asked_for(tmp_path: Path) -> None:
    longer = settings(train={"steps": 9}, checkpoint={"allow_changes": True})
    assert not is_done(begun(tmp_path, "finished", STEPS), longer)


@pytest.mark.parametrize("state", ["running", "finished"])
def test_to_begin_anew_sets_aside_what_is_there(tmp_path: Path, state: State) -> None:
    for number in (1, 2):
        run = begun(tmp_path, state)
        anew = settings(replay={"mode": "none"}, checkpoint={"resume": "never"})
        assert not is_done(run, anew)
        assert begin(run, anew, first_step=0, branched=None) == []
        aside = run / "superseded" / str(number)
        assert json.loads((aside / "config.json").read_text()) == settings()
        assert (aside / "metrics.jsonl").read_text().count("step") == 3
        end = read_end(aside)
        assert end is not None
        assert end.state == state
        assert not (run / "metrics.jsonl").exists()


def test_a_branch_of_another_run_says_what_it_changes(tmp_path: Path) -> None:
    now = settings(optimizer={"lr": 0.5}, checkpoint={"resume": "elsewhere/step-000002"})
    assert not is_done(tmp_path, now)
    [change] = begin(tmp_path, now, first_step=2, branched=settings())
    assert str(change) == "optimizer.lr: 0.0001 -> 0.5"


def test_a_setting_that_a_version_before_did_not_have_counts_with_its_default() -> None:
    saved = settings()
    del saved["optimizer"]["lr"]
    assert differences(saved, settings()) == []
    [change] = differences(saved, settings(optimizer={"lr": 0.5}))
    assert change.key == "optimizer.lr"
    saved["optimizer"]["of_another_version"] = 1
    assert {each.key for each in differences(saved, settings())} == {"optimizer.lr", "optimizer.of_another_version"}
