"""`moe-trm doctor CONFIG --layouts A B`: clean layouts agree, and a fault in one of them is named at its operation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch.start.checks import Check
from moe_trm.cli import main
from moe_trm.errors import ConfigError
from moe_trm.recording.bundle import BundleWriter
from moe_trm.tools.doctor import layout_comparison
from moe_trm.tools.doctor.layout_comparison import LayoutRun, LayoutValues, compare_layouts, judge_layouts
from moe_trm.tools.doctor.probe import ProbeFailed
from tests.integration.learner_support.tiny import EXPERTS, TOP_K, make_checkpoint
from tests.integration.ranks import fork_ranks
from tests.unit.records import make_record

ROWS, MOE_LAYERS, NUM_LAYERS = 4, (0, 2), 3
SCRIPT = Path(__file__).with_name("layout_faults.py")
ONE, TWO = "learner.parallel.expert=1", "learner.parallel.expert=2"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with recorded rows: its model has a dense layer between two with experts."""
    folder = tmp_path_factory.mktemp("layouts")
    checkpoint = make_checkpoint(folder / "model")
    records = [
        replace(
            make_record(sample_id=number, num_prompt=6, num_sampled=10 + number, layers=MOE_LAYERS), sampling_mask=None
        ).bound()
        for number in range(ROWS)
    ]
    assert (EXPERTS, TOP_K) == (8, 2)
    BundleWriter(str(folder / "bundle")).write(1, records)
    path = folder / "config.yaml"
    path.write_text(
        f"model: {{checkpoint: {checkpoint}}}\n"
        f"rollout: {{engine: bundle, bundle: {folder / 'bundle'}}}\n"
        "learner: {dtype: float32}\nprobe: {every: 0}\n"
    )
    return path


def forked(fault: str) -> layout_comparison.Start:
    """`start_ranks` by forks, with a fault."""

    def start(run: LayoutRun, arguments: Sequence[str], out: Path) -> None:
        out.mkdir(parents=True)
        done = fork_ranks([str(SCRIPT), fault, *arguments, *run.overrides], run.ranks)
        assert done.ok, done.stderr[-4000:]

    return start


@pytest.fixture(scope="module")
def clean(config: Path, tmp_path_factory: pytest.TempPathFactory) -> LayoutValues:
    return measured(config, ONE, "none", tmp_path_factory.mktemp("clean") / "out")


def measured(config: Path, words: str, fault: str, out: Path) -> LayoutValues:
    run = LayoutRun.of(str(config), (), words)
    forked(fault)(run, layout_comparison.arguments_of(str(config), config.with_name("bundle"), 1, ROWS, out), out)
    return LayoutValues.read(out)


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


FOUND = {
    "attention": ("forward pass", "layer 1: attention differs first"),
    "router": ("forward pass", "layer 2: router differs first"),
    "experts": ("forward pass", "layer 2: experts differs first"),
    "gradient": ("gradients", "model.layers.1.self_attn.o_proj.weight differs first"),
}


@pytest.mark.parametrize("fault", list(FOUND))
def test_a_fault_in_one_layout_is_named(config: Path, clean: LayoutValues, tmp_path: Path, fault: str) -> None:
    checks = by_name(judge_layouts(measured(config, TWO, fault, tmp_path / "out"), clean, "float32", NUM_LAYERS))
    name, words = FOUND[fault]
    assert checks[name].status == "fail", checks
    assert words in checks[name].says
    assert checks["forward pass"].status == ("ok" if fault == "gradient" else "fail")
    if fault != "gradient":
        assert checks["gradients"].status == "skip"


CLEAN = [
    TWO,
    pytest.param("learner.parallel.tensor=2 learner.parallel.expert_tensor=2", marks=pytest.mark.slow),
    pytest.param("learner.parallel.context=2", marks=pytest.mark.slow),
    pytest.param("learner.parallel.pipeline=2 learner.parallel.first_stage_layers=2", marks=pytest.mark.slow),
    pytest.param("learner.parallel.expert=1 ranks=2", marks=pytest.mark.slow),
    pytest.param("learner.backend=deepspeed", marks=pytest.mark.slow),
    pytest.param("batch.layout=packed", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("words", CLEAN)
def test_clean_layouts_agree(config: Path, clean: LayoutValues, tmp_path: Path, words: str) -> None:
    values = measured(config, words, "none", tmp_path / "out")
    checks = judge_layouts(values, clean, "float32", NUM_LAYERS)
    assert {check.status for check in checks} == {"ok"}, checks
    assert values.files.keys() == clean.files.keys()


@pytest.mark.slow
def test_the_command_compares_two_layouts(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(config), "--layouts", ONE, TWO, "--json", str(tmp_path / "a.json")]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert (document["healthy"], document["layouts"]) == (True, [ONE, TWO])
    assert "gradients: all values agree" in capsys.readouterr().out


REFUSED = {
    "equal": ((ONE, ONE), {}, "the two layouts are equal"),
    "another model": ((ONE, "model.checkpoint=other"), {}, "settings of the learner alone"),
    "half a model": ((ONE, f"{TWO} ranks=3"), {}, "whole copies of the model"),
    "experts that cannot be shared": ((ONE, "learner.parallel.expert=3"), {}, "expert"),
    "too few rows": ((ONE, f"{TWO} ranks=8"), {}, "too few rows"),
    "no recording": ((ONE, TWO), {"rollout.bundle": "nowhere"}, "there are none"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_pairs_that_cannot_be_are_refused_before_a_rank_starts(config: Path, tmp_path: Path, case: str) -> None:
    pair, settings, words = REFUSED[case]

    def start(*_: object) -> None:
        raise AssertionError("started")

    overrides = [f"{key}={value}" for key, value in settings.items()]
    with pytest.raises(ConfigError, match=words):
        compare_layouts(str(config), overrides, pair, 8, tmp_path, lambda _: None, start)


def test_a_rank_that_fails_is_told_with_its_last_words(config: Path, tmp_path: Path) -> None:
    run = LayoutRun.of(str(config), (), ONE)
    arguments = layout_comparison.arguments_of(str(config), tmp_path / "nowhere", 1, ROWS, tmp_path / "out")
    with pytest.raises(ProbeFailed, match="the recording has no such step"):
        layout_comparison.start_ranks(run, arguments, tmp_path / "out")
