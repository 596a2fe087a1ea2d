"""The masked share against the gap: the exponent that runs were made with, and steps that have no logarithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evidence.masked_share import GAP, KEPT, finished, measure, points
from moe_trm.errors import RunError
from moe_trm.run_folder.run import Row, Run, read_run

GAPS = (0.01, 0.03, 0.02, 0.16)


def run(name: str, power: float) -> Run:
    steps = [{"step": step, GAP: gap, KEPT: 1 - 0.2 * gap**power} for step, gap in enumerate(GAPS, start=2)]
    return Run(Path(name), {"name": name}, [{"step": 0}, {"step": 1, GAP: 0.0, KEPT: 1.0}, *steps], ())


def test_the_exponent_of_each_run_and_their_mean() -> None:
    first, second, both = measure([run("a", 0.5), run("b", 0.7)])
    assert (first["run"], first["steps"]) == ("a", len(GAPS)), "a step without a gap has no logarithm"
    assert [first["exponent"], second["exponent"]] == pytest.approx([0.5, 0.7])
    assert first["rank_correlation"] == pytest.approx(1)
    assert both["runs"] == 2
    assert both["exponent"] == pytest.approx(0.6)
    assert float(both["exponent_low"]) < 0.5


def test_a_value_that_is_not_finite_is_no_point() -> None:
    rows: list[Row] = [
        {"step": 1, GAP: None, KEPT: 0.5},
        {"step": 2, GAP: 0.1, KEPT: None},
        {"step": 3, GAP: 0.1, KEPT: 0.75},
    ]
    assert points(Run(Path("a"), {}, rows, ())) == [(0.1, 0.25)]


def test_runs_that_have_not_finished_are_left_out(tmp_path: Path) -> None:
    for name, steps in (("IcePop-seed10", 2), ("IcePop-seed2", 2), ("IcePop-seed3", 3), ("TIS-seed0", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"name": name, "train": {"steps": steps}}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
    found = finished(tmp_path, "IcePop")
    assert [path.name for path in found] == ["IcePop-seed2", "IcePop-seed10"]
    assert read_run(found[0]).complete
    with pytest.raises(RunError, match="no run of this arm has finished here"):
        finished(tmp_path, "OPSM")
