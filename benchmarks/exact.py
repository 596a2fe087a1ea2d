"""Costs and gains of exactness: runs with `exact: true` beside runs that differ by rounding.

`python -m benchmarks.exact [--checkpoint DIR ...] [--steps N] [--arms ARM ...] [--json FILE]`

Short runs on real SGLang servers and Megatron-Core, of one rank, from one start and seed: exact, with float32 in both
engines, and with a bfloat16 rollout, with and without replay. Largest k3 and flip rate of all steps, medians of
seconds. The flip rate counts updates as well, whose weights have moved. `rollout s` is the wait for samples,
`learner s` the scoring and the updates. An exact run ends with an error at the first token that differs, so `steps` of
it are proved. The reward is the share of even ids.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.options import command_line
from benchmarks.short_run import record_run, starting_checkpoint
from benchmarks.table import Row, report
from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.families import make_family

COMMON = [
    "task.reward=benchmarks.even_ids:share",
    "rollout.top_p=1",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "learner.parallel.expert=1",
    "learner.dtype=float32",
    "sync.prove_every=10",
    "rollout.server.startup_timeout_s=1200",
]
FLOAT32 = "rollout.server.dtype=float32"
ARMS: Mapping[str, Sequence[str]] = {
    "exact": [FLOAT32, "exact=true"],
    "float32": [FLOAT32],
    "bfloat16, replayed": [],
    "bfloat16": ["replay.mode=none"],
}


def measured(model: str, checkpoint: Path, folder: Path, arm: str, steps: int) -> Row:
    """The figures of one run."""
    folder.mkdir(parents=True)
    record_run(checkpoint, folder, steps, [*COMMON, *ARMS[arm]])
    lines = (folder / "runs" / "short-run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seen = [row for row in map(json.loads, lines) if "engine/k3_kl" in row]

    def largest(name: str) -> float | str:
        return max((row[name] for row in seen if name in row), default="")

    def median(*names: str) -> float:
        return float(statistics.median(sum(row[name] for name in names) for row in seen))

    return {
        "model": model,
        "arm": arm,
        "steps": len(seen),
        "largest k3": largest("engine/k3_kl"),
        "flips, updates included": largest("routing/local_flip_rate"),
        "decode gap": largest("weights/decode_gap"),
        "learner gap": largest("weights/learner_gap"),
        "rollout s": median("time/rollout_s"),
        "learner s": median("time/score_s", "time/update_s"),
        "step s": median("time/step_s"),
        "reward, last tenth": statistics.mean(row["reward/mean"] for row in seen[-max(1, len(seen) // 10) :]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="of Qwen3-MoE (default: the quickstart's)")
    parser.add_argument("--steps", type=int, default=50, help="of each run (default: 50)")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--models", nargs="+", choices=["qwen3_moe", "glm4_moe"], default=["qwen3_moe", "glm4_moe"])
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-trm-exact-") as scratch:
            folder, rows = args.folder or Path(scratch), []
            for model in args.models:
                if model == "qwen3_moe":
                    checkpoint = starting_checkpoint(args.checkpoint, folder).resolve()
                else:
                    checkpoint = make_family(model, folder / model)
                rows += [measured(model, checkpoint, folder / f"{model}-{arm}", arm, args.steps) for arm in args.arms]
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    report(f"Exact runs of {args.steps} steps beside others", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
