"""The quickstart's printed summary and drawings, from run directories made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_trm.tools.quickstart.plot import draw
from moe_trm.tools.quickstart.summary import pooled_mismatch, print_mismatch, read_metrics
from moe_trm.tools.quickstart.trials import Outcome, Trial, trials


def make_run(folder: Path, seed: int) -> Path:
    """Ten prompts of twenty tokens; one token in ten has flipped routes and is ten times further off without replay."""
    rng = np.random.default_rng(seed)
    flipped = (rng.random(200) < 0.1).astype(np.int16)
    replayed = rng.normal(0, 0.01, 200).astype(np.float32)
    native = replayed + flipped * rng.choice([-0.1, 0.1], 200).astype(np.float32)
    (folder / "probe").mkdir(parents=True)
    arrays = {"group_id": np.repeat(np.arange(10), 20), "native": native, "replayed": replayed}
    save_file({**arrays, "flipped_layers": flipped}, folder / "probe" / "step-000002-rank0.safetensors")
    rows = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": 0.3}]
    rows.append({"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / f"seed{seed}", seed) for seed in range(2)]


def test_runs_are_pooled_and_their_prompts_kept_apart(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    figures = pooled_mismatch(runs, num_layers=4)
    assert (figures["tokens"].value, figures["prompts"].value) == (400, 20)
    assert figures["flipped/k3_reduction"].value > 20
    assert figures["all/native_k3"].low < figures["all/native_k3"].value < figures["all/native_k3"].high
    print_mismatch(figures)
    printed = capsys.readouterr().out
    assert "400 tokens of 20 prompts" in printed
    assert str(figures["flipped/native_k3"]) in printed


def test_the_picture_shows_what_the_metrics_say(runs: list[Path]) -> None:
    figures = pooled_mismatch(runs, num_layers=4)
    picture = draw({run.name: read_metrics(run) for run in runs}, figures)
    root = ElementTree.fromstring(picture)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"seed0", "seed1", f"{figures['all/native_k3'].value:.1e}"} <= set(words)
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 * 2 + 4, "two evaluations a run, and four pooled figures"
    heights = {float(element.attrib["cy"]) for element in circles if float(element.attrib["cx"]) in (60.0, 480.0)}
    assert sorted(heights) == pytest.approx([300 - 240 * 0.8, 300 - 240 * 0.1])


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [(0.1, 0.8, True), (0.31, 0.8, False), (0.1, 0.69, False), (0.29, 0.70, True), (0.30, 0.69, False)],
)
def test_a_learning_run_must_meet_all_three_bounds(before: float, after: float, passed: bool) -> None:
    assert Outcome(trials([0], controls=False)[0], before, after, 100.0, 80).passed is passed


def test_controls_must_not_learn() -> None:
    learning, frozen, shuffled = trials([0], controls=True)
    assert isinstance(learning, Trial)
    assert [Outcome(frozen, 0.1, after, 1, 80).passed for after in (0.1, 0.12, 0.14)] == [True, True, False]
    assert [Outcome(shuffled, 0.1, after, 1, 80).passed for after in (0.0, 0.19, 0.21)] == [True, True, False]


def test_the_command_itself_imports_no_torch() -> None:
    program = "import sys, moe_trm.tools.quickstart.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
