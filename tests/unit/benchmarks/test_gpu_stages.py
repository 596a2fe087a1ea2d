"""The stages of `benchmarks.gpu`: a budget, results that stay, and settings that a run accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.gpu.page import page
from benchmarks.gpu.session import Session, figures
from benchmarks.gpu.stages import CONFIG, Device, Stage, stages
from moe_trm.config import load


def stage(name: str, code: str, limit_s: float = 60.0, *, fused: bool = False) -> Stage:
    return Stage(name, f"about {name}", limit_s, ("-c", code), fused=fused)


def run(folder: Path, *planned: Stage, budget_s: float = 1000.0, fused: bool = False) -> dict[str, int]:
    """The status of planned_stage stage that has a result after a session."""
    with Session(folder, budget_s, fused) as session:
        session.run(planned)
    return {name: result["status"] for name, result in session.results().items()}


def test_a_stage_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    count = stage("count", f"open({str(tmp_path / 'times')!r}, 'a').write('x')")
    for _ in range(2):
        assert run(tmp_path, count, stage("fails", "print('why'); raise SystemExit(3)")) == {"count": 0, "fails": 3}
    assert (tmp_path / "times").read_text() == "x"
    assert "why" in (tmp_path / "logs" / "fails.log").read_text()


def test_a_stage_begins_only_where_enough_of_the_budget_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, stage("long", "", 900.0), stage("short", "", 50.0), budget_s=500.0) == {"short": 0}
    assert "it may take 900" in capsys.readouterr().out
    assert run(tmp_path, stage("long", "", 900.0), budget_s=1000.0) == {"short": 0, "long": 0}


def test_a_stage_that_takes_too_long_is_ended_and_the_next_begins(tmp_path: Path) -> None:
    slow = stage("slow", "import time; time.sleep(600)", 2.0)
    assert run(tmp_path, slow, stage("next", "")) == {"slow": 124, "next": 0}


def test_stages_with_transformer_engine_wait_for_it(tmp_path: Path) -> None:
    needs = stage("fused", "", fused=True)
    assert run(tmp_path, needs) == {}
    assert run(tmp_path, needs, fused=True) == {"fused": 0}


def test_figures_are_what_a_stage_wrote_or_the_medians_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "cost.json").write_text(json.dumps({"ms": 2.5}))
    rows = [{"what": "write", "s/GB": 0.5}, {"what": "read", "s/GB": 0.25}]
    (tmp_path / "figures" / "table.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "runs" / "whole").mkdir(parents=True)
    lines = [{"step": n, "time/step_s": float(n), "reward/mean": n / 4, "optimizer/lr": 1.0} for n in range(1, 4)]
    (tmp_path / "runs" / "whole" / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert figures(tmp_path, "cost") == {"ms": 2.5}
    assert figures(tmp_path, "table") == {"write: s/GB": 0.5, "read: s/GB": 0.25}
    assert figures(tmp_path, "whole") == {
        "steps": 2, "time/step_s": 2.0, "reward/mean, first": 0.25, "reward/mean, last": 0.75,
    }  # fmt: skip
    assert figures(tmp_path, "nothing") == {}


def test_the_page_shows_every_result() -> None:
    results = {
        "whole": {"answers": "a run", "status": 0, "seconds": 12.4, "figures": {"time/step_s": 0.123456}},
        "lent": {"answers": "memory", "status": 124, "seconds": 240.0, "figures": {}},
    }
    text = page(results, "2026-11-27")
    assert "| whole | a run | well | 12 |" in text
    assert "| lent | memory | too late | 240 |" in text
    assert "| time/step_s | 0.1235 |" in text
    assert "## lent" not in text


@pytest.mark.parametrize("device", get_args(Device))
def test_every_run_has_settings_that_are_accepted(tmp_path: Path, device: Device) -> None:
    planned = list(stages(tmp_path, device))
    assert len({stage.name for stage in planned}) == len(planned)
    for planned_stage in planned:
        settings = [word for word in planned_stage.words if "=" in word and not word.startswith("-")]
        config = load(CONFIG, settings)
        if planned_stage.server is not None and "launch.train" in planned_stage.words:
            assert load(CONFIG, planned_stage.server).rollout.server == config.rollout.server
