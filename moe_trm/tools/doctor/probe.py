"""The zero-update probe: one step of the configured run at learning rate 0, by the code that trains.

Its prompts have every length.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.run_folder.run import Row, read_run
from moe_trm.runtime.python import run_module
from moe_trm.tasks.build import build_task
from moe_trm.tasks.protocol import Task
from moe_trm.tools.doctor.measurements import Measurements, read_measurements

NAME = "doctor"
PROMPTS, GROUP = 16, 8

NEUTRAL = (
    f"name={NAME}",
    "train.steps=1",
    "train.export=false",
    "train.eval_every=0",
    "train.max_restarts=0",
    "optimizer.lr=0",
    "optimizer.schedule=constant",
    "learner.minibatches=1",
    "learner.epochs=1",
    "replay.mode=R3",
    "replay.max_local_flip_rate=1.0",  # to be measured, not to stop at
    "pipeline={}",
    "probe.every=1",
    "probe.tokens=0",
    "probe.save=true",
    "loss={measure_entropy: true}",
    "correction={}",
    "kl={}",
    "batch={}",
    "eval={}",
    "checkpoint.every=0",
    "checkpoint.resume=never",
    "checkpoint.export_every=0",
    "observe={report: false, transcripts: 0, panel: off}",
)
"""Overrides that turn any run into a measurement: nothing is learnt, corrected, filtered or kept."""


@dataclass(frozen=True)
class Probed:
    """The metrics of the probe's step, as in `metrics.jsonl`, and its measurements token by token."""

    metrics: Row
    measurements: Measurements


class ProbeFailed(MoeTrmError):
    """The probe's run ended before it had measured anything."""


def zero_update(config_path: str, overrides: Sequence[str], config: Config, folder: Path) -> Probed:
    """Run the probe in `folder`.

    Raises:
        ProbeFailed: the run failed; its last words are in `got`.
        BundleError, RunError: it left less than it should.
    """
    bundle = folder / "bundle"
    words = [*overrides, *NEUTRAL, f"run_dir={folder}", f"record.bundle={bundle}"]
    if config.rollout.traits.samples_live:
        words += _prompts(build_task(config.task, config.model.checkpoint, config.seed), folder)
        if config.rollout.starts_server:
            # Whatever goes on with the weights of the start differs from the first push then.
            proved = config.sync.prove_every and config.rollout.traits.scores_tokens
            words += ["rollout.server.port=0", f"rollout.server.random_weights={str(bool(proved)).lower()}"]
    log = folder / "job.log"
    with log.open("wb") as output:
        job = subprocess.run(
            run_module("moe_trm", "train", config_path, *words),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),
            check=False,
        )
    if job.returncode:
        raise ProbeFailed("the probe's run failed", where=str(log), got=last_error(log.read_text(errors="replace")))
    run = folder / NAME
    return Probed(read_run(run).rows[-1], read_measurements(bundle, run / "probe"))


def last_error(log: str) -> str:
    """The last typed error that a log tells of with its lines, else its end."""
    lines = log.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.split(":")[0].removeprefix("error").strip().endswith("Error")]
    starts += [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return "\n".join(lines[-10:])
    first = min(starts)
    body = [lines[first]]
    for line in lines[first + 1 :]:
        if not line.startswith("  "):
            break
        body.append(line)
    return "\n".join(body)


def _prompts(task: Task, folder: Path) -> list[str]:
    """The task's own prompts, cut to every length from one token on.

    Faults that only long contexts show must be told from those that all contexts show.
    """
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(task.train_prompts(1, PROMPTS)):
            share = 1 if number % 2 else (number // 2 + 1) / (PROMPTS // 2)
            text = task.tokens.decode(prompt.token_ids[: max(1, round(share**2 * len(prompt.token_ids)))])
            file.write(json.dumps({"prompt": text or "1", "answer": "-"}) + "\n")
    settings = {"name": "jsonl", "prompts": str(path), "reward": "exact"}
    return [
        f"task={json.dumps(settings)}",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.group_size={GROUP}",
        "rollout.function=null",
        "rollout.agent=null",
        "task.eval_size=0",
    ]
