"""What foresees a turn of the reward: moments that count, an AUROC by run, leads, and steps that later runs join."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import early_warning
from benchmarks.evidence.early_warning import FIRST, K3, REWARD, Steps, judged
from tests.unit.benchmarks.test_router_noise import DYING, LIVING, line

LENGTH = "response/length_mean"


def steps(name: str, rewards: tuple[float, ...], k3: tuple[float, ...]) -> Steps:
    return Steps(name, {REWARD: rewards, K3: k3, LENGTH: [10.0] * len(rewards)})


RUNS = [
    *(steps(f"none-seed{seed}", DYING.rewards, DYING.k3) for seed in range(3)),
    *(steps(f"calm-seed{seed}", LIVING.rewards, LIVING.k3) for seed in range(3)),
]


def test_moments_end_at_the_turn_and_where_the_future_is_not_known() -> None:
    found = RUNS[0].moments("k3", 20)
    assert found is not None
    assert RUNS[0].turned == 68
    # Steps 20 to 67 count: it turns within 20 steps from the 48th on.
    assert (len(found[1]), int(found[1].sum())) == (48, 20)
    calm = RUNS[3].moments("k3", 20)
    assert calm is not None
    # What the steps after the 80th would bring is not known: it has 100.
    assert (len(calm[1]), int(calm[1].sum())) == (61, 0)
    assert steps("short-seed0", (1.0,) * 15, (0.1,) * 15).moments("k3", 20) is None, "it has no moment yet"


def test_figures_warn_in_the_direction_that_was_fixed() -> None:
    growth, below = RUNS[0].figure("k3_growth"), RUNS[0].figure("below_best")
    assert growth is not None
    assert below is not None
    assert growth[0] == pytest.approx(1.0)
    assert growth[-1] == pytest.approx(np.mean(DYING.k3[-10:]) / 0.1)
    assert below[-1] == pytest.approx(1 - np.mean(DYING.rewards[-10:]) / np.mean(DYING.rewards[45:55]), abs=0.02)
    shares = Steps("none-seed0", {"total/rollout_is_seq_eff_sample_size": line((0, 0.9), (40, 0.1))})
    found = shares.figure("row_ess")
    assert found is not None
    assert (np.diff(found) > 0).all(), "fewer effective answers warn"
    assert shares.figure("chi2") is None, "it was not measured"


def test_a_figure_that_tells_has_leads_and_one_that_does_not_has_none() -> None:
    told = judged(RUNS, "k3", 20, "all")
    assert told is not None
    assert told["auroc"] == pytest.approx(1.0, abs=0.2)
    assert (told["warned"], told["false_alarms"]) == ("3 of 3", "0 of 3")
    assert isinstance(told["median_lead"], float | int)
    assert 10 < told["median_lead"] < 48
    silent = judged(RUNS, "length", 20, "all")
    assert silent is not None
    assert (silent["auroc"], silent["warned"], silent["median_lead"]) == (0.5, "0 of 3", "none")
    assert judged(RUNS[3:], "k3", 20, "all") is None, "nothing turned"


def test_a_threshold_is_of_other_runs() -> None:
    """A single run whose k3 is high throughout does not raise the bar that it is judged by."""
    loud = steps("loud-seed0", LIVING.rewards, (5.0,) * 100)
    told = judged([*RUNS, loud], "k3", 20, "all")
    assert told is not None
    assert told["false_alarms"] == "1 of 4"


def test_later_runs_join_earlier_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, told = tmp_path / "steps.json", tmp_path / "rows.json"
    for arm, course in (("none", DYING), ("R3", LIVING)):
        run = tmp_path / arm / f"{arm}-seed0"
        run.mkdir(parents=True)
        both = zip(course.rewards, course.k3, strict=True)
        rows = [{"step": 0, "eval/avg_at_1": 0.4}, *({REWARD: r, K3: k, LENGTH: 9.0} for r, k in both)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        assert early_warning.main(["--steps", str(file), "--out", str(tmp_path / arm), "--json", str(told)]) == 0
    stored = json.loads(file.read_text())
    assert sorted(stored) == ["R3-seed0", "none-seed0"]
    assert sorted(stored["none-seed0"]) == sorted((REWARD, K3, LENGTH))
    found = json.loads(told.read_text())["rows"]
    assert [(row["run"], row["reward_turned_at"]) for row in found[:2]] == [("R3-seed0", "never"), ("none-seed0", 68)]
    assert {row["runs"] for row in found[2:]} == {"all"}, "of one run nothing can be said"
    assert len(stored["R3-seed0"][K3]) == 100 > FIRST
    capsys.readouterr()
    assert early_warning.main(["--steps", str(file)]) == 0
    assert "k3_growth" in capsys.readouterr().out
