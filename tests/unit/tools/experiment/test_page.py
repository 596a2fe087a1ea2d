"""The page and the table of an experiment: figures of the files, and no more claimed than they show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_trm.run_folder.run import Run
from moe_trm.tools.experiment.arms import Arm
from tests.unit.observe.report.page_reader import PageReader
from tests.unit.tools.experiment.scripted import Scripted


def made(folder: Path, accuracies: Mapping[str, Sequence[float | None]], **changes: Any) -> Scripted:
    """A finished experiment with these final accuracies by arm and seed; a run of None fails."""
    trial = Scripted(
        folder,
        arms={arm: [f"optimizer.lr={place + 1}e-4"] for place, arm in enumerate(accuracies)},
        seeds=list(range(len(next(iter(accuracies.values()))))),
        **changes,
    )
    trial.tell(
        {
            f"{arm}-seed{seed}": {"fails_at": 2} if value is None else {"accuracy": value}
            for arm, values in accuracies.items()
            for seed, value in enumerate(values)
        }
    )
    trial.run(jobs=4)
    return trial


def row(trial: Scripted, begins: str) -> list[str]:
    """Cells of the first row that begins like this, in the tables in Markdown after the matrix of arms by figures."""
    details = (trial.out / "table.md").read_text().partition("## Paired differences")[2]
    line = next(line for line in details.splitlines() if line.startswith(f"| {begins}"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_a_difference_that_the_interval_shows(tmp_path: Path) -> None:
    """Differences 0.29, 0.3, 0.31: mean 0.3, deviation 0.01, so 4.303 * 0.01 / sqrt(3) = 0.0248 on either side."""
    trial = made(tmp_path, {"plain": [0.20, 0.30, 0.40], "better": [0.49, 0.60, 0.71]})
    cells = row(trial, "accuracy of greedy answers (eval/accuracy)")
    assert cells[1:4] == ["After step 3", "better - plain", "+0.3 [0.275, 0.325]"]
    assert cells[5:] == ["0: 0.29, 1: 0.3, 2: 0.31", "0.25", "higher in better: the interval leaves 0 out"]
    said = (trial.out / "table.md").read_text()
    assert "0.3 in plain, 0.6 in better; paired difference +0.3 [0.275, 0.325] over 3 seeds: higher in better" in said
    assert "| accuracy of greedy answers (eval/accuracy) | 0.3 | 0.6 (+0.3 [0.275, 0.325]) |" in said


def test_welch_stands_beside_the_paired_interval(tmp_path: Path) -> None:
    """Deviations 0.1 and 0.11 of three: error sqrt(0.0221 / 3) = 0.0858, 3.96 degrees of freedom, 3.182 of three."""
    trial = made(tmp_path, {"plain": [0.20, 0.30, 0.40], "better": [0.49, 0.60, 0.71]})
    assert row(trial, "accuracy of greedy")[4] == "[0.0269, 0.573]"


@pytest.mark.parametrize(("prompts", "warned"), [(256, True), (10_000, False)])
def test_an_interval_narrower_than_its_answers_allow_is_warned_of(tmp_path: Path, prompts: int, warned: bool) -> None:
    """Shares of 0.5 and 0.6: (0.25 + 0.24) / 256 per pair, so 1.96 sqrt(3 * 0.001914) / 3 = 0.0495; they say 0.0025."""
    trial = Scripted(tmp_path)
    shares = {"none": [0.5, 0.5, 0.5], "R3": [0.6, 0.601, 0.599]}
    trial.tell(
        {
            f"{arm}-seed{seed}": {"accuracy": value, "prompts": prompts}
            for arm, values in shares.items()
            for seed, value in enumerate(values)
        }
    )
    trial.run(jobs=4)
    text = (trial.out / "table.md").read_text()
    said = "WARNING: the interval is narrower than 256 answers of a run allow by themselves (+-0.0495)"
    assert (said in text) is warned


def test_repeated_seeds_show_the_noise_of_a_repetition_and_are_in_no_mean(tmp_path: Path) -> None:
    """0.5 and 0.7, 0.51 and 0.51: sqrt((0.04 + 0) / 4) = 0.1. Over seeds 0.5, 0.51, 0.52: 0.01."""
    trial = Scripted(tmp_path, repeated_seeds=[0, 1])
    trial.tell({"none-seed0-again": {"accuracy": 0.7}, "none-seed1-again": {"accuracy": 0.51}})
    assert trial.run(jobs=4) == 0
    text = (trial.out / "table.md").read_text()
    assert "| accuracy of greedy answers (eval/accuracy) | 0: 0.5, 0.7; 1: 0.51, 0.51 | 0.1 | 0.01 |" in text
    assert row(trial, "eval/accuracy")[1] == "0.51 [0.485, 0.535]; 0.5, 0.51, 0.52"
    assert "none: 3 of 3 runs finished." in text
    assert row(trial, "none-seed0-again")[1] == "finished"
    assert trial.run() == 0
    assert trial.starts("none-seed0-again") == [0], "it goes on where it stopped"


def test_without_a_repeated_seed_there_is_no_such_table(tmp_path: Path) -> None:
    trial = made(tmp_path, {"plain": [0.2, 0.3, 0.4], "other": [0.5, 0.6, 0.7]})
    assert "Repetition noise" not in (trial.out / "table.md").read_text()


def test_pairs_show_what_the_spread_over_seeds_hides(tmp_path: Path) -> None:
    """The seeds differ by 0.2 and the arms by 0.05 in each of them."""
    trial = made(tmp_path, {"a": [0.2, 0.4, 0.6], "b": [0.25, 0.451, 0.649]})
    assert row(trial, "accuracy of greedy")[-1].startswith("higher in b")


def test_a_difference_that_is_not_shown(tmp_path: Path) -> None:
    """The bootstrap of three positive differences leaves 0 out, and three values are no ground for that."""
    trial = made(tmp_path, {"plain": [0.20, 0.30, 0.40], "other": [0.21, 0.40, 0.70]})
    assert row(trial, "accuracy of greedy")[-1] == "not shown: the interval holds 0"
    assert "not shown: the interval holds 0" in (trial.out / "report.html").read_text()


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_allow_no_claim(tmp_path: Path, seeds: int) -> None:
    trial = made(tmp_path, {"plain": [0.1, 0.1][:seeds], "better": [0.9, 0.9][:seeds]})
    for page in ("report.html", "table.md"):
        text = (trial.out / page).read_text()
        assert f"no claim is possible with {seeds} seed" in text
        assert "With fewer than 3 seeds no claim is possible" in text
        assert "higher in" not in text


def test_failures_stand_beside_the_claim_and_their_seed_is_in_no_pair(tmp_path: Path) -> None:
    trial = made(tmp_path, {"plain": [0.2, 0.3, 0.4, 0.5], "better": [0.49, 0.6, None, 0.81]})
    cells = row(trial, "accuracy of greedy")
    assert cells[5].split(", ")[-1].startswith("3: ")
    assert "2: " not in cells[5]
    assert cells[-1].endswith("of the finished runs alone: 1 of 4 runs of better failed")
    assert row(trial, "better-seed2")[1] == "failed"


def test_where_every_run_of_an_arm_failed_there_is_no_claim(tmp_path: Path) -> None:
    trial = made(tmp_path, {"plain": [0.2, 0.3, 0.4], "broken": [None, None, None], "other": [0.5, 0.6, 0.7]})
    text = (trial.out / "report.html").read_text()
    assert "broken against plain, accuracy of greedy answers (eval/accuracy): no claim is possible" in text
    assert "broken: 0 of 3 runs finished, 3 failed" in text
    assert row(trial, "accuracy of greedy")[2] == "other - plain"
    assert row(trial, "eval/accuracy")[2] == "not measured"


def test_where_nothing_finished_there_is_a_page_that_says_so(tmp_path: Path) -> None:
    trial = made(tmp_path, {"plain": [None, None, None], "other": [None, None, None]})
    text = PageReader((trial.out / "report.html").read_text()).text
    assert "No run has finished yet." in text
    assert "no seed has finished in both" in text


def test_every_table_has_the_figures_of_the_files(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    # 0.5, 0.51, 0.52: Student's interval of the mean is 0.51 -+ 4.303 * 0.01 / sqrt(3).
    assert row(trial, "eval/accuracy")[1] == "0.51 [0.485, 0.535]; 0.5, 0.51, 0.52"
    assert row(trial, "engine, k3 KL")[1].startswith("2e-4 [")
    assert row(trial, "replayed token-layers")[1:] == ["not measured", "1 [1, 1]"]
    assert row(trial, "sequences, tokens 17 to 64")[1].startswith("0.5 [0.5, 0.5]")
    assert row(trial, "positive advantage")[1].startswith("0.9 [")
    assert row(trial, "negative advantage")[1].startswith("0.7 [")
    assert row(trial, "seconds of a whole step")[1] == "0.5 [0.5, 0.5]"
    assert row(trial, "R3 | replay.mode") == ["R3", "replay.mode", "none", "R3"]
    page = PageReader((trial.out / "report.html").read_text())
    for title in ("Paired differences", "Final held-out evaluation", "Mismatch", "Kept shares", "Cost", "Every run"):
        assert title in page.text


def test_curves_are_means_with_their_interval_over_seeds(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    html = (trial.out / "report.html").read_text()
    page = PageReader(html)
    data = {run["name"]: run["metrics"] for run in page.data["runs"]}
    assert data["R3"]["reward/mean"] == {"steps": [1, 2, 3], "values": pytest.approx([0.11, 0.21, 0.31])}
    reward = next(d for d in page.drawings if d.marks and d.marks[0][1]["data-metric"] == "reward/mean")
    assert {mark["data-run"] for _, mark in reward.marks} == {"0", "1"}
    drawing = next(part for part in html.split("<svg") if 'aria-label="Reward"' in part)
    places = re.findall(r'<polygon class="band f0" points="([^"]+)"', drawing)[0].split()
    reach = 4.303 * 0.01 / math.sqrt(3)
    corners = [(reward.step(float(x)), reward.value(float(y))) for x, y in (place.split(",") for place in places)]
    expected = [(s, 0.1 * s + 0.01 + reach) for s in (1, 2, 3)] + [(s, 0.1 * s + 0.01 - reach) for s in (3, 2, 1)]
    assert [value for corner in corners for value in corner] == pytest.approx(
        [value for corner in expected for value in corner], abs=2e-3
    )


def test_a_value_that_is_not_finite_leaves_the_mean_out_and_no_number_in(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    path = trial.out / "R3-seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2]["reward/mean"] = None
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert trial.run(only_report=True) == 0
    page = PageReader((trial.out / "report.html").read_text())
    assert page.data["runs"][1]["metrics"]["reward/mean"]["values"][1] is None


def test_text_of_a_log_breaks_neither_page_nor_table(tmp_path: Path) -> None:
    trial = Scripted(tmp_path)
    assert trial.run() == 0
    path = trial.out / "states.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"state": "failed", "reason": "error: <script>alert(1)</script> a|b\nsecond"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trial.run(only_report=True) == 1
    assert "<script>alert" not in (trial.out / "report.html").read_text()
    assert "a\\|b second |" in (trial.out / "table.md").read_text()


def test_a_band_is_over_all_finished_runs_or_none(tmp_path: Path) -> None:
    def run(seed: int, values: list[float | None]) -> Run:
        return Run(tmp_path / str(seed), {}, [{"step": n, "m": value} for n, value in enumerate(values, 1)], ())

    arm = Arm("arm", {0: run(0, [1, 2, 3]), 1: run(1, [2, None, 5]), 2: run(2, [3, 4, 7])}, ())
    found = {step: (low, high) for step, low, high in arm.reach("m")}
    assert set(found) == {1, 3}
    assert found[1] == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)), abs=1e-3)
