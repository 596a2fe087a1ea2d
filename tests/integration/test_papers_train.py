"""Two steps with every line of settings of docs/papers.md: real learner, rollouts recorded from the real server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from docs.make.paper_table import REPOSITORY, rows
from moe_trm.config import resolve
from moe_trm.config.schema import Config
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.recording.bundle import BundleReader, BundleWriter
from tests.integration.jobs import metrics_of, run_job, write_config
from tests.integration.objective_support.cases import REWARD, stale

SAMPLES, RECORDED, STEPS = 16, 4, 2
"""Samples of a step; steps of the recording, more than are trained since sampling may run ahead; steps of a run."""
SIZES = [
    "task.max_digits=1",
    "task.eval_size=0",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "learner.parallel={}",
    "learner.micro_batch_rows=8",
    "learner.micro_batch_tokens=null",
    "optimizer.warmup_steps=0",
    "checkpoint.every=0",
    "train.eval_every=0",
    "train.export=false",
    f"train.steps={STEPS}",
]
LINES = {(method.base, method.run): method.name for _, method in reversed(rows()) if method.run is not None}
"""The name of the first row of each line of settings, by its file and settings."""


@dataclass(frozen=True)
class Kind:
    """The recording that a line of settings can train on.

    Attributes:
        group_size: samples of a prompt.
        refills: groups of equal rewards are dropped, and others are sampled in the same step.
        old: samples are one version old, where there was one.
        greedy: each prompt has a greedy answer, too.
    """

    group_size: int
    refills: bool
    old: bool
    greedy: bool

    @classmethod
    def of(cls, config: Config) -> Kind:
        drops = config.batch.zero_variance == "drop"
        greedy = ADVANTAGES[config.advantage.name].reads_greedy
        return cls(config.rollout.group_size, drops, old=config.pipeline.staleness_limit > 0, greedy=greedy)

    @property
    def settings(self) -> list[str]:
        """Settings that recording and repetition share."""
        return [
            f"rollout.group_size={self.group_size}",
            f"rollout.prompts_per_step={SAMPLES // self.group_size}",
            f"batch.zero_variance={'drop' if self.refills else 'keep'}",
        ]


@pytest.fixture(scope="module")
def recording(
    tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path, attached: list[str]
) -> Callable[[Kind], Path]:
    """Makes the bundle of a kind, each of them once."""
    folder = tmp_path_factory.mktemp("papers")
    config = write_config(folder, brief_checkpoint)

    @cache
    def made(kind: Kind) -> Path:
        bundle = folder / f"{kind.group_size}-{kind.refills}-{kind.old}-{kind.greedy}"
        if kind.old:
            reader, writer = BundleReader(str(made(replace(kind, old=False)))), BundleWriter(str(bundle))
            for step in reader.steps():
                writer.write(step, [stale(record) for record in reader.read(step)])
            return bundle
        # Of one sample there is no group to compare.
        whole = ["advantage.name=reinforce_plus_plus"] if kind.group_size == 1 else []
        whole += ["advantage.name=remax"] if kind.greedy else []
        run = [f"name={bundle.name}", f"train.steps={RECORDED}", f"record.bundle={bundle}", "learner.parallel.expert=1"]
        plain = [*run, *whole, "probe.every=0", "probe.save=false"]
        assert run_job(config, [*attached, *REWARD, *kind.settings, *plain], 1) == 0
        return bundle

    return made


@pytest.mark.slow
@pytest.mark.parametrize(("base", "settings"), LINES, ids=LINES.values())
def test_two_steps(
    base: str,
    settings: Sequence[str],
    recording: Callable[[Kind], Path],
    brief_checkpoint: Path,
    tmp_path: Path,
) -> None:
    path = str(REPOSITORY / base)
    kind = Kind.of(resolve(path, [*SIZES, "rollout.prompts_per_step=4", *settings]).config)
    overrides = [
        *SIZES,
        *REWARD,
        *settings,
        *kind.settings,
        "rollout.engine=bundle",
        f"rollout.bundle={recording(kind)}",
        f"model.checkpoint={brief_checkpoint}",
        f"run_dir={tmp_path}",
        "name=two",
    ]
    assert run_job(path, overrides, 1) == 0
    trained = [row for row in metrics_of(tmp_path / "two") if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2]
    for row in trained:
        assert math.isfinite(row["optimizer/grad_norm"])
        assert row["ledger/trained"] > 0
    assert any(row["optimizer/grad_norm"] > 0 and row["correction/kept_fraction"] > 0 for row in trained)
    if kind.old:
        assert trained[-1]["rollout/age_max"] == 1


@pytest.mark.long
def test_two_steps_from_a_teacher(attached: list[str], brief_checkpoint: Path, tmp_path: Path) -> None:
    """The example of distillation; the server that samples is the teacher too, at the weights that were pushed last."""
    [url] = [setting.split("=", 1)[1] for setting in attached if setting.startswith("rollout.url=")]
    own = [f"kl.teacher=[{url}]", f"model.checkpoint={brief_checkpoint}", f"run_dir={tmp_path}", "name=taught"]
    # A second update in a step would compare weights that the first one has moved.
    own += ["learner.minibatches=1"]
    assert run_job(str(REPOSITORY / "examples/distillation/config.yaml"), [*SIZES, *attached, *own], 1) == 0
    trained = [row for row in metrics_of(tmp_path / "taught") if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2]
    # By another pass of the same weights, a token is as likely but for rounding.
    assert abs(trained[0]["reference/k1_kl"]) < 1e-6
    assert all(row["teacher/repeat_abs_diff"] < 1e-3 for row in trained)
    assert trained[-1]["optimizer/grad_norm"] > 0
