"""Whole recorded runs on uneven pipelines: stale samples, packs, rules, probes, checkpoints; those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.short_run import metrics_of
from moe_trm.config import load
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from tests.drills.resume_drill import books_balance, timeless
from tests.integration.ranks import fork_ranks
from tests.integration.recordings import make_recording
from tests.integration.resume_support import CONFIG, STEPS, assert_exports_what_the_learner_exported

pytestmark = pytest.mark.slow

TIMING = ("ledger/", "queue/")
"""Metrics that say how far ahead sampling happened to be."""
LAYOUTS = {
    "PP2": (2, ["pipeline=2", "first_stage_layers=2"]),
    "PP2+VPP2": (2, ["pipeline=2", "pipeline_layout=Et*2|t|t*2|L"]),
    "loss alone": (2, ["pipeline=2", "pipeline_layout=Et*5|L"]),
    "EP2xPP2+VPP2": (4, ["expert=2", "pipeline=2", "pipeline_layout=Ett|t||ttL"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of five layers, and a recording whose samples are two versions old from the third step on."""
    folder = tmp_path_factory.mktemp("uneven")
    make_checkpoint(folder / "start", shape=TinyShape(layers=5, hidden=32, experts=4, expert_ffn=16))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    make_recording(load(folder / "config.yaml", []), folder / "bundle", STEPS, age=2)
    return folder


def run(folder: Path, name: str, ranks: int, parallel: list[str], *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run that does not overlap: samples of two older versions are anchored at their snapshots."""
    settings = [f"name={name}", *(f"learner.parallel.{size}" for size in parallel), "pipeline.mode=async"]
    rules = "correction.rules=[{name: trm_max, target_reject_rate: 0.25}, {name: icepop}]"
    program = ["-m", "launch.train", str(folder / "config.yaml"), *settings, rules, "train.export=true", *overrides]
    done = fork_ranks(program, ranks)
    assert done.ok, done.stderr[-6000:]
    rows = metrics_of(folder / name)
    assert books_balance(rows)
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in timeless(rows)]


@pytest.fixture(scope="module")
def one(folder: Path) -> list[dict[str, Any]]:
    rows = run(folder, "one", 1, ["expert=1"])
    assert rows[-1]["rollout/age_max"] == 2
    assert min(row["correction/kept_fraction"] for row in rows[1:]) < 1
    return rows


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]], *, cut_alike: bool = True) -> None:
    """Equal metrics, up to rounding; those of micro-batches only where these are `cut_alike`."""
    assert len(rows) == len(expected)
    for got, row in zip(rows, expected, strict=True):
        assert got.keys() == row.keys()
        for key, value in row.items():
            if not cut_alike and key.startswith("batch/"):
                continue
            if isinstance(value, str) or key.endswith(("kept_fraction", "kept_sequence_fraction", "token_layers")):
                assert got[key] == value, key
            else:
                assert got[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_on_stale_samples_is_that_of_one_process(
    folder: Path, one: list[dict[str, Any]], name: str, form: str
) -> None:
    ranks, parallel = LAYOUTS[name]
    rows = run(folder, f"{name}-{form}".replace(" ", "-"), ranks, parallel, f"batch.layout={form}")
    assert_same(rows, one, cut_alike=ranks == 2 and form == "padded")


def test_one_uneven_layout_goes_on_from_another_and_a_checkpoint_exports(
    folder: Path, one: list[dict[str, Any]]
) -> None:
    """Virtual stages to step 2, then the loss alone to the end."""
    first = run(folder, "first", *LAYOUTS["PP2+VPP2"], "checkpoint.keep=9")
    begin = folder / "first" / "checkpoints" / "step-000002"
    rest = run(folder, "rest", *LAYOUTS["loss alone"], f"checkpoint.resume={begin}")
    assert_same(first, one)
    assert_same(rest[-2:], one[-2:])
    for name in ("first", "rest"):
        assert_exports_what_the_learner_exported(folder / name, STEPS)
