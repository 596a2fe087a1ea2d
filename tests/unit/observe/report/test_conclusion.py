"""Several runs: the sentence has the figures of the files, and claims no more than they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.observe.report.commands import write
from moe_trm.observe.report.conclusion import configurations, differences, sentences
from moe_trm.run_folder.run import Run, read_run
from tests.unit.observe.report.made_run import make_run
from tests.unit.observe.report.page_reader import PageReader


def a_run(folder: Path, accuracy: float, *, seed: int = 0, drop: str = "", **settings: Any) -> Path:
    """A run whose last evaluation is `accuracy`; `drop`: a metric that it did not measure."""
    run = make_run(folder, seed=seed, **settings)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["eval/accuracy"] = accuracy
    lines = [json.dumps({key: value for key, value in row.items() if key != drop}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def read(*folders: Path) -> list[Run]:
    return [read_run(folder) for folder in folders]


def test_one_seed_each_has_a_difference_and_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = a_run(tmp_path / "plain", 0.5, replay={"mode": "R2"})
    other = a_run(tmp_path / "routed", 0.75, replay={"mode": "R3"})
    (said,) = sentences(read(one, other))
    assert "After step 8, accuracy of greedy answers (eval/accuracy): 0.5 in plain, 0.75 in routed" in said
    assert "a difference of +0.25." in said
    assert "one seed, so there is no interval" in said
    assert "95% interval" not in said
    assert main(["report", str(one), str(other)]) == 0
    assert said in capsys.readouterr().out
    assert said in PageReader((one / "report-routed.html").read_text()).text


def test_seeds_of_one_configuration_are_grouped_and_give_an_interval(tmp_path: Path) -> None:
    """Two groups of three: means 0.2 and 0.8, deviation 0.1, so Welch's error is sqrt(2 * 0.01 / 3) = 0.08165."""
    low = [a_run(tmp_path / f"low-{s}", v, seed=s, replay={"mode": "R2"}) for s, v in enumerate((0.1, 0.2, 0.3))]
    high = [a_run(tmp_path / f"high-{s}", v, seed=s, replay={"mode": "R3"}) for s, v in enumerate((0.7, 0.8, 0.9))]
    runs = read(*low, *high)
    assert [each.label for each in configurations(runs)] == ["replay.mode=R2 (3 runs)", "replay.mode=R3 (3 runs)"]
    found = differences(runs)[0]
    assert found.delta == pytest.approx(0.6)
    assert found.interval == pytest.approx((0.6 - 2.776 * 0.081650, 0.6 + 2.776 * 0.081650), abs=1e-4)
    assert "higher in replay.mode=R3 (3 runs): the interval leaves 0 out" in found.sentence
    # The same spread around the same mean shows nothing.
    equal = [a_run(tmp_path / f"equal-{s}", v, seed=s, replay={"mode": "none"}) for s, v in enumerate((0.1, 0.25, 0.3))]
    assert "No difference is shown" in sentences(read(*low, *equal))[0]
    assert "(3 runs)" in PageReader(write([*low, *high]).read_text()).text


def test_a_seed_twice_is_no_second_seed(tmp_path: Path) -> None:
    one = [a_run(tmp_path / f"one-{n}", 0.2, replay={"mode": "R2"}) for n in range(2)]
    other = [a_run(tmp_path / f"other-{n}", 0.1 * n, seed=n, replay={"mode": "R3"}) for n in range(2)]
    found = differences(read(*one, *other))[0]
    assert found.interval is None
    assert "replay.mode=R2 (2 runs) has one seed" in found.sentence


def test_runs_that_differ_by_seed_alone_have_a_mean(tmp_path: Path) -> None:
    runs = read(*(a_run(tmp_path / f"run-{seed}", 0.1 * seed, seed=seed) for seed in (1, 2, 3)))
    (said,) = sentences(runs)
    assert "same settings apart from the seed" in said
    assert "0.2, 95% interval -0.0484 to 0.448" in said


def test_runs_are_compared_at_steps_that_both_have(tmp_path: Path) -> None:
    one = make_run(tmp_path / "short", done=5, replay={"mode": "R2"})
    other = make_run(tmp_path / "long", replay={"mode": "R3"})
    found = {each.measure.metric: each for each in differences(read(one, other))}
    assert found["eval/accuracy"].when == "After step 4"
    assert found["reward/mean"].when == "Over steps 1 to 5"
    assert found["reward/mean"].delta == 0


def test_what_only_one_of_them_measured_is_not_compared(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", 0.5, drop="eval/accuracy", replay={"mode": "R2"})
    other = a_run(tmp_path / "other", 0.5, replay={"mode": "R3"})
    assert "reward of the samples" in sentences(read(one, other))[0]
