"""Every preset and loss by configuration alone: two steps of a recorded run on the real learner, checked in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.recording.bundle import BundleReader, BundleWriter
from tests.integration.jobs import STEPS, metrics_of, run_job, timeless, write_config
from tests.integration.objective_support.cases import OWN_METHODS, REWARD, WEIGHS_ONLY, all_cases, doctored
from tests.integration.ranks import fork_ranks

DRIVER = str(Path(__file__).parent / "objective_support" / "driver.py")
FEW = (
    "preset-decoupled_geo_rs_seq_tis",
    "preset-bypass_pg_geo_rs_token_tis",
    "loss-gspo",
    "loss-kl_cov",
    "m2po",
    "normalised",
    "own",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objectives")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    return write_config(folder, brief_checkpoint)


@pytest.fixture(scope="module")
def bundle(folder: Path, config: Path, attached: list[str]) -> Path:
    """A run recorded from the real server, and then made to look worse than it was."""
    # In float32 both engines agree closely: rules reject what was added, and the gradient of the rest is not empty.
    overrides = [
        "name=recorded",
        *REWARD,
        *attached,
        "probe.every=0",
        "batch.layout=auto",
        "probe.save=false",
        f"record.bundle={folder / 'recorded'}",
    ]
    assert run_job(config, overrides) == 0
    reader, writer = BundleReader(str(folder / "recorded")), BundleWriter(str(folder / "doctored"))
    for step in reader.steps():
        writer.write(step, [doctored(record) for record in reader.read(step)])
    return folder / "doctored"


def run_cases(config: Path, bundle: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    done = fork_ranks([DRIVER, str(config), str(bundle), str(out), *names], 1)
    assert done.ok, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


def advantages_of(bundle: Path) -> dict[int, dict[float, float]]:
    """GRPO by hand: advantage by group and reward."""
    rewards: dict[int, list[float]] = {}
    reader = BundleReader(str(bundle))
    for record in (record for step in reader.steps() for record in reader.read(step)):
        rewards.setdefault(record.group_id, []).append(float(record.reward or 0.0))
    return {
        group: {r: float((r - np.mean(own)) / (np.std(own, ddof=1) + 1e-6)) for r in own}
        for group, own in rewards.items()
    }


def check(name: str, result: dict[str, Any]) -> None:
    """The logged kept share and gradient norms are those of float64, and rules that can reject have rejected."""
    rows = [row for row in result["metrics"] if row["step"] > 0]
    assert len(rows) == STEPS, name
    per_step = len(result["updates"]) // STEPS
    for index, row in enumerate(rows):
        updates = result["updates"][index * per_step : (index + 1) * per_step]
        kept, tokens = (sum(update[key] for update in updates) for key in ("num_kept", "num_tokens"))
        assert row["correction/kept_fraction"] == pytest.approx(kept / tokens, abs=1e-9), name
        for update in updates:
            assert update["grad_norm"] == pytest.approx(update["expected_grad_norm"], rel=2e-4, abs=1e-6), name
    everything = [row["correction/kept_fraction"] for row in rows]
    if name.removeprefix("preset-") in WEIGHS_ONLY:
        assert everything == [1.0] * STEPS, name
    else:
        assert min(everything) < 1, f"{name} rejected nothing"
    rejecting = name.removeprefix("preset-") not in WEIGHS_ONLY
    telling = [
        update
        for update in result["updates"]
        if update["expected_grad_norm"] > 1e-2 and (update["num_kept"] < update["num_tokens"] or not rejecting)
    ]
    assert telling, f"{name} never had something rejected and a gradient of the rest"


@pytest.mark.long
def test_a_few_of_them(config: Path, bundle: Path, folder: Path) -> None:
    for name, result in run_cases(config, bundle, folder, list(FEW)).items():
        check(name, result)
        if name != "normalised":
            expected = advantages_of(bundle)
            for group, reward, advantage in (row for update in result["updates"] for row in update["rows"]):
                assert advantage == pytest.approx(expected[group][reward], abs=1e-4)


@pytest.mark.long
def test_rows_are_packed_where_a_run_asks_for_the_form_that_this_machine_has_proved(bundle: Path, folder: Path) -> None:
    """Two steps on samples of a real server, with every route proved in the packs."""
    assert bundle.is_dir()
    settled = json.loads((folder / "runs" / "recorded" / "config.json").read_text())["batch"]["layout"]
    assert settled == ("padded" if torch.cuda.is_available() else "packed")
    rows = metrics_of(folder / "runs" / "recorded")[1:]
    assert len(rows) == STEPS
    for row in rows:
        assert row["replay/applied_fraction"] == 1.0
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["batch/padding_fraction"] == 0.0 or settled == "padded"
        assert row["engine/k3_kl"] < 1e-6


@pytest.mark.slow
def test_all_of_them(config: Path, bundle: Path, folder: Path) -> None:
    for name, result in run_cases(config, bundle, folder, [name for name in all_cases() if name not in FEW]).items():
        check(name, result)


@pytest.mark.long
def test_a_rule_and_a_loss_of_ones_own_train_and_are_reported(config: Path, bundle: Path, folder: Path) -> None:
    """Under the real torchrun, by path; both are named by the report, the rule in its chart too."""
    recorded = ["rollout.engine=bundle", f"rollout.bundle={bundle}", "learner.parallel.expert=1", "probe.every=0"]
    assert run_job(str(config), ["name=own", *recorded, *REWARD, *OWN_METHODS, "probe.save=false"]) == 0
    rows = metrics_of(folder / "runs" / "own")[1:]
    assert len(rows) == STEPS
    assert min(row["correction/negative_gap_mask/kept_fraction"] for row in rows) < 1
    assert all("loss/leaked_fraction" in row and row["optimizer/grad_norm"] > 0 for row in rows)
    page = (folder / "runs" / "own" / "report.html").read_text(encoding="utf-8")
    about = page.partition("</header>")[0]
    assert "methods.py:negative_gap_mask" in about
    assert "methods.py:leaky_clip" in about
    assert "negative_gap_mask" in page.partition("</header>")[2]


LAYOUTS = {
    "PP2": ["learner.parallel.pipeline=2"],
    "PP2+VPP2": ["learner.parallel.pipeline=2", "learner.parallel.virtual_pipeline=2"],
    "CP2": ["learner.parallel.context=2", "learner.micro_batch_rows=2"],
    "TP2+SP": ["learner.parallel.tensor=2", "learner.parallel.expert_tensor=2"],
    "TP2xEP2": ["learner.parallel.tensor=2", "learner.parallel.expert=2"],
    "EP2": ["learner.parallel.expert=2"],
    "EP2 small": ["learner.parallel.expert=2", "learner.micro_batch_rows=2"],
    "packed": ["batch.layout=packed"],
    "CP2 packed": ["learner.parallel.context=2", "batch.layout=packed"],
    "TP2+SP packed": ["learner.parallel.tensor=2", "learner.parallel.expert_tensor=2", "batch.layout=packed"],
    "PP2+VPP2 packed": ["learner.parallel.pipeline=2", "learner.parallel.virtual_pipeline=2", "batch.layout=packed"],
    "DeepSpeed packed": ["learner.backend=deepspeed", "batch.layout=packed"],
}


FAST = ("PP2",)


def run_layout(config: Path, bundle: Path, folder: Path, name: str, *layout: str) -> list[dict[str, Any]]:
    """Two recorded steps with rules on the whole minibatch, on rows and on tokens, and a probe at each step.

    The first update of Adam is the sign of a gradient, which rounding decides where a gradient is nearly zero. Sums in
    another order therefore move some weights by the learning rate, which is small here.
    """
    rules = "{name: m2po, thresholds: {budget: 0.001}}, {name: trm_max, thresholds: {max_kl: 0.5}}, {name: icepop}"
    overrides = [
        *("rollout.engine=bundle", f"rollout.bundle={bundle}", *REWARD, "optimizer.warmup_steps=0"),
        *(f"correction.rules=[{rules}]", "loss.name=unclipped", "learner.parallel.expert=1", "optimizer.lr=1e-5"),
        *(f"name={name}", *layout),
    ]
    assert run_job(config, overrides) == 0
    return timeless(metrics_of(folder / "runs" / name))[1:]


@pytest.fixture(scope="module")
def one_process(config: Path, bundle: Path, folder: Path) -> list[dict[str, Any]]:
    return run_layout(config, bundle, folder, "one-process")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_run_on_any_layout_is_that_of_one_process(
    name: str, one_process: list[dict[str, Any]], config: Path, bundle: Path, folder: Path
) -> None:
    rows = run_layout(config, bundle, folder, name, *LAYOUTS[name])
    for got, expected in zip(rows, one_process, strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if key.startswith("batch/"):
                continue  # ranks and packs cut a minibatch in other ways
            if isinstance(value, str) or key.endswith(("kept_fraction", "kept_sequence_fraction", "token_layers")):
                assert got[key] == value, key
            # The mean over tokens whose ratio is above one counts those that are one but for rounding.
            elif key != "correction/m2po/score":
                # Log-ratios are differences of numbers of order one in float32; k3 is of their squares.
                # The certificate is made of the largest of them, squared or under a root.
                relative, absolute = 1e-2 if key.startswith("trm/") else 1e-4, 1e-7 if key.endswith("k3_kl") else 2e-6
                assert got[key] == pytest.approx(value, rel=relative, abs=absolute), key
    for rule in ("", "m2po/"):
        assert min(row[f"correction/{rule}kept_fraction"] for row in rows) < 1
