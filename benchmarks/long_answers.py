"""A recording of a real run whose answers have every length up to 500 tokens, for `benchmarks.length_bias --bundle`.

`python -m benchmarks.long_answers FOLDER [--steps 48] [key=value ...]` trains the random model of `soak_job`. It ends
an answer at any token with about the same probability. SGLang samples in bfloat16, the learner computes in float32, and
no rule rejects anything. The recording is FOLDER/bundle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import command_line
from benchmarks.soak_job import SHAPE
from launch.job import run_job
from moe_trm.models.tiny.checkpoint import make_checkpoint

SERVER = {"port": 0, "dtype": "bfloat16", "max_total_tokens": 131072, "max_running_requests": 128}
JOB = {
    "name": "long-answers",
    "task": {"max_digits": 2, "eval_size": 0, "reward": "benchmarks.soak_job:share_of_digits"},
    "rollout": {"prompts_per_step": 16, "group_size": 12, "max_new_tokens": 500, "server": SERVER},
    "replay": {"mode": "R3"},
    "probe": {"every": 0},
    "optimizer": {"lr": 1e-4},
    "learner": {"minibatches": 2, "micro_batch_tokens": 8192},
    "train": {"export": False},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("folder", type=Path, help="where model, run and recording go")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--steps", type=int, default=48, help="training steps (default: 48)")
    args = parser.parse_intermixed_args(argv)
    folder: Path = args.folder
    make_checkpoint(folder / "model", shape=SHAPE)
    config = folder / "config.yaml"
    places = {"model": {"checkpoint": str(folder / "model")}, "run_dir": str(folder / "runs")}
    config.write_text(json.dumps(JOB | places), encoding="utf-8")  # JSON is YAML
    run_settings = [f"train.steps={args.steps}", f"record.bundle={folder / 'bundle'}"]
    return run_job(str(config), [*run_settings, *args.overrides])


if __name__ == "__main__":
    sys.exit(main())
