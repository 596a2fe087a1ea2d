"""`make collapse`: what it says of two runs, in words and by its status, and the picture it draws."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.evidence import router_noise
from benchmarks.evidence.router_noise import Course, verdict
from moe_trm.experiment.plan import make_plan

STEPS = 100


def line(*points: tuple[int, float]) -> tuple[float, ...]:
    """Values at every step, straight between the points."""
    found: list[float] = []
    for (at, low), (until, high) in itertools.pairwise(points):
        found += [low + (high - low) * step / (until - at) for step in range(until - at)]
    return tuple(found)


DYING = Course(line((0, 0.4), (50, 0.45), (100, 0.05)), line((0, 0.1), (30, 0.1), (100, 1.5)))
LIVING = Course(line((0, 0.35), (100, 0.45)), line((0, 0.01), (100, 0.012)))
FALLING = Course(line((0, 0.4), (50, 0.45), (100, 0.3)), DYING.k3)
UNWARNED = Course(DYING.rewards, line((0, 0.1), (95, 0.1), (100, 1.5)))


def test_a_death_that_was_warned_of_is_shown() -> None:
    said, shown = verdict(DYING, LIVING)
    assert shown
    assert "Without replay the run died" in said[0]
    assert "0.09 at the end" in said[0]
    assert "(R3) the run lived" in said[1]
    # k3 grows by 0.02 a step: the mean of steps 32 to 41 is above 0.2. The reward falls by 0.008 a step from 0.45.
    assert DYING.warned == 41
    assert DYING.turned == 68
    assert said[2] == "Engine k3 had doubled at step 41, 27 steps before the reward turned (step 68)."


@pytest.mark.parametrize(
    ("none", "replayed", "words"),
    [
        (LIVING, LIVING, "no turn that a figure could have warned of"),
        (DYING, DYING, "(R3) the run died"),
        (FALLING, Course(line((0, 0.2), (100, 0.25)), LIVING.k3), "Without replay the run fell"),
    ],
)
def test_what_is_not_shown_is_said(none: Course, replayed: Course, words: str) -> None:
    said, shown = verdict(none, replayed)
    assert not shown
    assert words in "\n".join(said)
    assert said[-1].startswith("NOT AS EXPECTED")


def test_a_figure_that_did_not_warn_is_said_to_have_not() -> None:
    said, shown = verdict(UNWARNED, LIVING)
    assert shown
    assert "and did not warn" in said[2]


def test_a_reward_that_comes_back_has_not_turned() -> None:
    assert Course(line((0, 0.4), (40, 0.1), (100, 0.4)), LIVING.k3).turned is None


def test_it_reads_the_runs_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm, course in (("none", DYING), ("R3", LIVING)):
        run = tmp_path / f"{arm}-seed0"
        run.mkdir()
        rows = [{"step": 0, "eval/avg_at_1": 0.4}]  # the evaluation before the first step
        both = zip(course.rewards, course.k3, strict=True)
        rows += [{"step": at, "reward/mean": r, "engine/k3_kl": k} for at, (r, k) in enumerate(both, start=1)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    told = tmp_path / "rows.json"
    assert router_noise.main(["--only-report", "--out", str(tmp_path), "--json", str(told)]) == 0
    living, dying = json.loads(told.read_text())["rows"]
    assert (dying["run"], dying["steps"], dying["reward_turned_at"], dying["fate"]) == ("none-seed0", 100, 68, "died")
    assert (living["k3_doubled_at"], living["reward_turned_at"], living["fate"]) == ("never", "never", "lived")
    assert "the run died" in capsys.readouterr().out
    picture = ElementTree.fromstring((tmp_path / "collapse.svg").read_text())
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert f"reward turns: step {DYING.turned}" in words
    assert f"k3 has doubled: step {DYING.warned}" in words


@pytest.mark.parametrize("file", [router_noise.FILE, "benchmarks/evidence/router_noise.yaml"])
def test_arms_of_its_experiments_load(file: str) -> None:
    """All arms are resolved; the model that they start from is not made for it."""
    plan = make_plan(file, None, lambda _config, _ranks: None)
    assert {"none", "R3"} <= plan.configs.keys()
    assert plan.configs["R3"].rollout == plan.configs["none"].rollout
    assert plan.configs["R3"].rollout.fake_router_noise > 0
    assert plan.configs["R3"].replay.mode == "R3"
