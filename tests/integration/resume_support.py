"""What the resumption tests share: configuration, an undisturbed run, runs in the background, what a run exports."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.short_run import metrics_of
from launch.job import learner_command, learner_environment
from moe_trm.cli import main as moe_trm
from moe_trm.config import load
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from tests.drills.resume_drill import books_balance
from tests.integration.ranks import Ended, fork_ranks
from tests.integration.recordings import make_recording

STEPS = 4
CONFIG = """
name: run
run_dir: {folder}
model: {{checkpoint: {folder}/start}}
task: {{max_digits: 1, eval_size: 0}}
rollout: {{engine: bundle, bundle: {folder}/bundle, prompts_per_step: 2, group_size: 4, top_k: 4}}
sampling_mask: {{mode: keep}}
replay: {{mode: R3, max_local_flip_rate: 1.0}}
probe: {{every: 2}}
correction:
  calibration_steps: 3
  rules: [{{name: trm_max, target_reject_rate: 0.25}}]
learner: {{minibatches: 2, micro_batch_rows: 2}}
checkpoint: {{every: 1}}
train: {{steps: {steps}, export: false}}
"""


class Job:
    """A command in the background, and what it printed."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("a") as file:
            everything = learner_environment(None) | environment
            self.process = subprocess.Popen(command, env=everything, stdout=file, stderr=file)

    def wait(self, timeout_s: float = 500.0) -> int:
        return self.process.wait(timeout_s)

    @property
    def output(self) -> str:
        return self._log.read_text()


def forked(folder: Path, name: str, *overrides: str, ranks: int = 2) -> Ended:
    """The same ranks, without torchrun around them and waited for: where nothing is killed."""
    settings = [f"name={name}", f"learner.parallel.expert={ranks}", *overrides]
    return fork_ranks(["-m", "launch.train", str(folder / "config.yaml"), *settings], ranks)


def start(folder: Path, name: str, *overrides: str, ranks: int = 2) -> Job:
    """The learner ranks of the run `name`, which share the experts, under torchrun."""
    settings = [f"name={name}", f"learner.parallel.expert={ranks}", *overrides]
    return Job(learner_command(str(folder / "config.yaml"), settings, ranks), folder / f"{name}.log")


def after_step(run: Path, step: int, job: Job) -> None:
    """Return once the metrics of `step` are written."""
    deadline = time.monotonic() + 500
    while len(metrics_of(run)) <= step:
        assert job.process.poll() is None, job.output
        assert time.monotonic() < deadline
        time.sleep(0.02)


def weights_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = HfCheckpoint(folder)
    return {name: checkpoint.read(name) for name in sorted(checkpoint.names)}


def assert_exports_what_the_learner_exported(run: Path, step: int) -> Path:
    """The exported folder, bit for bit what the learner left in `checkpoints/final`, and ready for any program."""
    assert moe_trm(["export", str(run), "--step", str(step)]) == 0
    exported = run / "checkpoints" / f"hf-{step:06d}"
    ours, learners = weights_of(exported), weights_of(run / "checkpoints" / "final")
    assert ours.keys() == learners.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, learners[name])]
    started = weights_of(run.parent / "start")
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, started[name])], "nothing was trained"
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / file).read_bytes() == (run / "checkpoints" / "final" / file).read_bytes()
    return exported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, a configuration, and a recording of its rollouts."""
    folder = tmp_path_factory.mktemp("resume")
    make_checkpoint(folder / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    make_recording(load(folder / "config.yaml", []), folder / "bundle", STEPS)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The run on two ranks that nothing happened to."""
    done = forked(folder, "alone", f"checkpoint.keep={STEPS}")
    assert done.ok, done.stderr
    assert all(row["optimizer/grad_norm"] > 0 for row in metrics_of(folder / "alone")[1:]), "nothing was trained"
    assert books_balance(metrics_of(folder / "alone"))
    return folder / "alone"
