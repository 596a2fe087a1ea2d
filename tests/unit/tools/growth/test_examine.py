"""Refusals of `doctor RUN --grown` before anything starts, and what the report says of its result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_trm.cli import main
from moe_trm.errors import ConfigError, RunError
from moe_trm.run_folder.growth import GROWTH_FILE, fixed_texts_say, grows_because
from moe_trm.run_folder.run import Run
from moe_trm.tools.growth.examine import examine_growth
from tests.unit.observe.report.made_run import make_run
from tests.unit.tools.growth.test_split import grown, sharper


def test_steps_in_the_wrong_order_and_runs_without_texts_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", task={"name": "jsonl"})
    with pytest.raises(ConfigError, match="the earlier one first"):
        examine_growth(run, (20, 10), 8, tmp_path)
    with pytest.raises(RunError, match="recorded no texts"):
        examine_growth(run, (1, 2), 8, tmp_path)
    bare = make_run(tmp_path / "bare", task={"name": "jsonl"}, record={"bundle": str(tmp_path / "nothing")})
    with pytest.raises(RunError, match="step 2, the first that checkpoint 1"):
        examine_growth(bare, (1, 2), 8, tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        examine_growth(tmp_path / "elsewhere", (1, 2), 8, tmp_path)


def test_the_command_takes_a_run_in_place_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(make_run(tmp_path / "run", task={"name": "jsonl"})), "--grown", "1", "2"]) != 0
    assert "the run recorded no texts after this checkpoint" in capsys.readouterr().err


def test_the_report_says_why_the_mismatch_grew_where_that_was_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    def page() -> str:
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
        return (tmp_path / "page.html").read_text()

    assert "grows because" not in page()
    for plant, shown in ((sharper, True), (None, False)):
        (run / GROWTH_FILE).write_text(json.dumps(asdict(grown(plant))))
        assert ("From checkpoint 10 to 20 the k3 grows because of other weights" in page()) == shown


@pytest.mark.parametrize(
    ("rise", "error", "shown"),
    [(3e-4, 5e-5, True), (3e-4, 1e-4, False), (3e-5, 1e-6, False), (-3e-4, 1e-5, False), (None, 1e-5, False)],
)
def test_fixed_texts_name_other_weights_only_with_evidence(rise: float | None, error: float, shown: bool) -> None:
    row = {"step": 20, "bank/native_k3_kl": 4e-4, "bank/native_k3_rise": rise, "bank/native_k3_rise_se": error}
    sentence = fixed_texts_say(Run(Path("run"), {}, [{"step": 10}, row, {"step": 21}], ()))
    assert ("Up to step 20 the k3 of fixed texts rose from 0.0001 to 0.0004 (6 standard errors)" in sentence) == shown
    assert bool(sentence) == shown


def test_a_damaged_result_is_told(tmp_path: Path) -> None:
    (tmp_path / GROWTH_FILE).write_text("{")
    assert "damaged" in grows_because(tmp_path)
