"""`make collapse`: what it says of two runs, in words and by its status, and the picture it draws."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.evidence import router_noise
from benchmarks.evidence.router_noise import Course, verdict
from moe_trm.tools.experiment.plan import make_plan

STEPS = 100


def line(*points: tuple[int, float]) -> tuple[float, ...]:
    """Values at every step, straight between the points."""
    found: list[float] = []
    for (at, low), (until, high) in itertools.pairwise(points):
        found += [low + (high - low) * step / (until - at) for step in range(until - at)]
    return tuple(found)


DYING = Course(
    line((0, 0.4), (50, 0.45), (100, 0.05)), line((0, 0.1), (30, 0.1), (100, 1.5)), line((0, 0.01), (100, 0.11))
)
LIVING = Course(line((0, 0.35), (100, 0.45)), line((0, 0.01), (100, 0.012)), (0.01,) * STEPS)
FALLING = Course(line((0, 0.4), (50, 0.45), (100, 0.3)), DYING.k3, DYING.tail)
UNWARNED = replace(DYING, tail=LIVING.tail)
LATE = replace(DYING, tail=line((0, 0.01), (95, 0.01), (100, 0.9)))


def test_a_death_that_was_warned_of_is_shown() -> None:
    said, shown = verdict(DYING, LIVING)
    assert shown
    assert "Without replay the run died" in said[0]
    assert "0.09 at the end" in said[0]
    assert "(R3) the run lived" in said[1]
    # The tail grows by 0.001 a step: the mean of steps 37 to 46 is above 0.05. The reward falls by 0.008 from 0.45.
    assert DYING.warned == 46
    assert DYING.turned == 68
    assert said[2].startswith(
        "At step 46 the share of tokens with a ratio between the engines beyond 2 (above 5%) warned"
    )
    assert "22 steps before the reward turned (step 68)" in said[2]
    assert "With replay it warned too, at step 46." in verdict(DYING, replace(LIVING, tail=DYING.tail))[0]


@pytest.mark.parametrize(
    ("none", "replayed", "words"),
    [
        (LIVING, LIVING, "nothing that a figure could have warned of"),
        (DYING, DYING, "(R3) the run died"),
        (FALLING, replace(LIVING, rewards=line((0, 0.2), (100, 0.25))), "Without replay the run fell"),
    ],
)
def test_what_is_not_shown_is_said(none: Course, replayed: Course, words: str) -> None:
    said, shown = verdict(none, replayed)
    assert not shown
    assert words in "\n".join(said)
    assert said[-1].startswith("NOT AS EXPECTED")


def test_a_figure_that_did_not_warn_is_said_to_have_not() -> None:
    for course, words in ((UNWARNED, "did not warn"), (LATE, "which is not before")):
        said, shown = verdict(course, LIVING)
        assert shown
        assert words in said[2]


def test_replay_that_gains_is_shown_where_nothing_falls_without() -> None:
    held = replace(DYING, rewards=(0.3,) * STEPS)
    said, shown = verdict(held, LIVING)
    assert shown
    assert "+0.14 from the reward without" in said[3]
    assert not verdict(replace(DYING, rewards=(0.4,) * STEPS), LIVING)[1], "a gain below 0.1"


def test_a_reward_that_comes_back_has_not_turned() -> None:
    assert replace(LIVING, rewards=line((0, 0.4), (40, 0.1), (100, 0.4))).turned is None


def test_it_reads_the_runs_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm, course in (("none", DYING), ("R3", LIVING)):
        run = tmp_path / f"{arm}-seed0"
        run.mkdir()
        rows = [{"step": 0, "eval/avg_at_1": 0.4}]  # the evaluation before the first step
        for at in range(STEPS):
            figures = {"reward/mean": course.rewards[at], "engine/k3_kl": course.k3[at]}
            high, low = router_noise.PARTS
            rows.append({"step": at + 1, **figures, high: course.tail[at], low: 0.0})
        rows.append({"step": STEPS, "eval/avg_at_1": 0.25})
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (run / "eval").mkdir()
    (run / "eval" / "final-learner.json").write_text(json.dumps({"metrics": {"eval/avg_at_1": 0.75}}))
    told = tmp_path / "rows.json"
    assert router_noise.main(["--only-report", "--out", str(tmp_path), "--json", str(told)]) == 0
    living, dying = json.loads(told.read_text())["rows"]
    assert (dying["run"], dying["steps"], dying["reward_turned_at"], dying["fate"]) == ("none-seed0", 100, 68, "died")
    assert (living["warned_at"], living["reward_turned_at"], living["fate"]) == ("never", "never", "lived")
    assert (living["engine_solves"], living["exported_solves"]) == (0.25, 0.75)
    assert (dying["engine_solves"], dying["exported_solves"]) == (0.25, "not measured")
    output = capsys.readouterr().out
    assert "the run died" in output
    assert (
        "R3: of the held-out sums the noisy engine solves 0.25, and the exported policy with its own routes 0.75."
        in output
    )
    picture = ElementTree.fromstring((tmp_path / "collapse.svg").read_text())
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert f"reward turns: step {DYING.turned}" in words
    assert f"warned: step {DYING.warned}" in words


@pytest.mark.parametrize("file", [router_noise.FILE, "benchmarks/evidence/router_noise.yaml"])
def test_arms_of_its_experiments_load(file: str) -> None:
    """All arms are resolved; the model that they start from is not made for it."""
    plan = make_plan(file, None, lambda _config, _ranks: None)
    assert {"none", "R3"} <= plan.configs.keys()
    assert plan.configs["R3"].rollout == plan.configs["none"].rollout
    assert plan.configs["R3"].rollout.fake_router_noise > 0
    assert plan.configs["R3"].replay.mode == "R3"
    assert plan.file.evaluations == ("learner",)
