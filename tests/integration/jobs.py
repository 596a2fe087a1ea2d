"""Small complete runs for the integration tests: configuration, a briefly warmed model, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import psutil

from launch import job
from moe_trm.tools.quickstart.warmup import WarmupRecipe
from tests.integration.ranks import forked_learner

STEPS = 2
CONFIG = """
name: {name}
run_dir: {run_dir}
model: {{checkpoint: {checkpoint}}}
task: {{max_digits: 1, eval_size: 16}}
rollout:
  prompts_per_step: 4
  group_size: 4
  top_p: 0.95
  max_new_tokens: 16
  server: {{port: 0, max_total_tokens: 8192, max_running_requests: 32, startup_timeout_s: 600}}
replay: {{mode: R3}}
probe: {{every: 1, save: true, thorough_every: 1}}
correction:
  rules:
    - {{name: trm_max, thresholds: {{max_kl: 0.5}}}}
    - {{name: icepop}}
learner: {{minibatches: 2, micro_batch_rows: 4, parallel: {{expert: 2}}}}
train: {{steps: {steps}, export: false}}
"""


# A few seconds of supervised steps on one-digit sums. Some samples are right and some wrong, so there is a gradient.
BRIEF = WarmupRecipe(
    max_digits=1, steps=50, further_steps=1, max_steps=50, mixed_steps=5, extra_rounds=0, eval_size=16,
    enough=0.0, max_greedy=1.0, min_working=0.0,
)  # fmt: skip


def write_config(folder: Path, checkpoint: Path) -> Path:
    """The configuration file of these runs; tests override what they need."""
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(name="live", run_dir=folder / "runs", checkpoint=checkpoint, steps=STEPS))
    return path


def run_job(config: Path | str, overrides: Sequence[str], num_ranks: int | None = None) -> int:
    """`launch.job.run_job` with its server, but with forks in place of torchrun and its ranks."""
    return job.run_job(str(config), overrides, num_ranks, forked_learner)


def still_running(processes: Sequence[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Those that have not ended by then. One that has ended and that nobody has collected is not running."""
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    timed = (
        "time/",
        "rollout/tokens_per_s",
        "rollout/servers",
        "rollout/recoveries",
        "rollout/reissued",
        "rollout/los",
        "rollout/retracted",
        "weights/decode_gap",  # a recording decodes nothing
        "weights/learner_gap",
        "weights/proof_s",
    )
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]
