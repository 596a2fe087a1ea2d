"""A short real run for measurements: the starting checkpoint, and training steps with recorded rollouts and scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.job import run_job
from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.checkpoint import make_checkpoint

WARM = Path("runs/quickstart-start")
SETTINGS = {
    "name": "short-run",
    "rollout": {"prompts_per_step": 16, "group_size": 8, "top_p": 0.95, "server": {"port": 0}},
    "replay": {"mode": "R3"},
    "probe": {"every": 0},
    "learner": {"parallel": {"expert": 2}},
    "task": {"eval_size": 0},
    "train": {"export": False},
}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines of `metrics.jsonl`; none when there is no file yet."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def starting_checkpoint(checkpoint: Path | None, folder: Path) -> Path:
    """The checkpoint to measure on: the given one, else the quickstart's if it exists, else a tiny random one.

    The last is made in `folder`.
    """
    if checkpoint is not None:
        return checkpoint
    if (WARM / "config.json").is_file():
        return WARM
    print(f"{WARM} does not exist yet (`make quickstart` makes it): measuring on random weights", flush=True)
    make_checkpoint(folder / "random")
    return folder / "random"


def record_run(checkpoint: Path, folder: Path, steps: int, overrides: Sequence[str] = ()) -> Path:
    """Train `steps` steps on sums with the real engines. Returns the recorded bundle, a folder under `folder`.

    Raises:
        MoeTrmError: the run failed; `ConfigError` and others when it was refused.
    """
    bundle = folder / "bundle"
    settings = SETTINGS | {"run_dir": str(folder / "runs"), "model": {"checkpoint": str(checkpoint)}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    code = run_job(str(path), [f"train.steps={steps}", f"record.bundle={bundle}", *overrides])
    if code:
        raise MoeTrmError(f"the run to measure on ended with exit code {code}", where=str(folder))
    return bundle
