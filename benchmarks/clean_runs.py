"""Long real runs with correct routes, in every arithmetic: the judges of routes may stop none of them.

`python -m benchmarks.clean_runs [--steps 300] [--only TEXT] [--timing sync stale] [--checkpoint PATH] [key=value ...]`
trains the quickstart's model on sums, with a real SGLang server, once for each learner, timing and arithmetic. The
weights of synchronous runs move at the quickstart's learning rate, the weights of stale ones ten times as fast under
samples that are up to eight versions old. Such a model soon gives one answer to all, from which nothing moves. So the
reward is a coin there, a bonus on entropy keeps answers apart, and no rule rejects what is stale.

A run holds when it does all its steps, replays every route and rejects nothing. A synchronous one also finds no sample
whose router has moved beyond the bound. The exit status is 1 when a run does not hold.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import command_line
from benchmarks.short_run import metrics_of, starting_checkpoint
from benchmarks.table import Row, report
from launch.job import learner_environment
from moe_trm.tasks import RewardInput

SETTINGS = {
    "name": "clean",
    "task": {"eval_size": 0},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "top_p": 0.95, "max_new_tokens": 24, "server": {"port": 0}},
    "replay": {"mode": "R3"},
    "probe": {"every": 5, "thorough_every": 1},
    "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.5}}, {"name": "token_tis"}]},
    "learner": {"minibatches": 2},
    "optimizer": {"lr": 1e-4},
    "train": {"export": False},
}
ARITHMETIC = {
    "float32 both": ("rollout.server.dtype=float32",),
    "bfloat16 both": ("learner.dtype=bfloat16",),
    "float16 both": ("learner.dtype=float16", "rollout.server.dtype=float16"),
    "float32, bfloat16 rollouts": (),
    "fp8_e4m3 weights": ("rollout.fake_quantization=fp8_e4m3",),
    "int8 weights": ("rollout.fake_quantization=int8",),
    "int4 weights": ("rollout.fake_quantization=int4",),
}
"""Settings of each case; unless it sets another, the rollout is in bfloat16 and the learner in float32."""
TIMING = {
    "sync": (),
    "stale": (
        "pipeline.mode=async",
        "pipeline.max_staleness=8",
        "optimizer.lr=1e-3",
        "task.reward=benchmarks.clean_runs:coin",
        "loss.entropy_coef=0.05",
        "correction.rules=[]",
    ),
}


def coin(sample: RewardInput) -> float:
    """1 or 0, by chance."""
    return float(random.random() < 0.5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default: 300)")
    parser.add_argument("--timing", nargs="+", choices=TIMING, default=[*TIMING], help="(default: all of them)")
    parser.add_argument("--backends", nargs="+", choices=("megatron", "deepspeed"), default=["megatron", "deepspeed"])
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases with TEXT in their names")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="the model (default: the quickstart's start)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders and logs here")
    args = parser.parse_intermixed_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="moe-trm-clean-") as temporary:
        checkpoint = starting_checkpoint(args.checkpoint, Path(temporary)).resolve()
        for backend, timing, case in itertools.product(args.backends, args.timing, ARITHMETIC):
            if args.only not in case:
                continue
            folder = (args.keep or Path(temporary)) / f"{backend}-{timing}-{case.replace(' ', '-').replace(',', '')}"
            case_settings = [f"learner.backend={backend}", *ARITHMETIC[case], *TIMING[timing]]
            run_settings = [*case_settings, f"train.steps={args.steps}", *args.overrides]
            figures = run(folder, checkpoint, run_settings, args.steps, may_move=timing == "stale")
            rows.append({"learner": backend, "timing": timing, "case": case, **figures})
            print(rows[-1], flush=True)
    report("Clean runs", rows, args.json)
    return 0 if rows and all(row["verdict"] == "holds" for row in rows) else 1


def run(folder: Path, checkpoint: Path, settings: Sequence[str], steps: int, *, may_move: bool) -> Row:
    """One run from the start; an older one in `folder` is refused by the launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(json.dumps(SETTINGS | {"model": {"checkpoint": str(checkpoint)}, "run_dir": str(folder)}))
    started = time.perf_counter()
    with (folder / "run.log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "moe_trm", "train", str(config), *settings],
            env=learner_environment(os.urandom(16).hex()),
            stdout=log,
            stderr=log,
            check=False,
        ).returncode
    seconds = time.perf_counter() - started
    if code:
        print((folder / "run.log").read_text(errors="replace")[-3000:], flush=True)
    return {"seconds": round(seconds), **judged(metrics_of(folder / "clean"), code, steps, may_move=may_move)}


def judged(metrics: Sequence[Mapping[str, Any]], code: int, steps: int, *, may_move: bool) -> Row:
    """Figures of a run, and its verdict: `holds`, or everything that does not.

    Args:
        may_move: routers may move beyond the bound between sampling and training.
    """
    trained = metrics[1:]
    last: Mapping[str, Any] = trained[-1] if trained else {}
    replayed = [row.get("replay/applied_fraction") for row in trained]
    moved = sum(row.get("routing/moved_samples") or 0.0 for row in trained)
    faults = {
        f"ended with exit code {code}": code != 0,
        f"{len(trained)} of {steps} steps": len(trained) != steps,
        "not every route was replayed": any(share != 1.0 for share in replayed),
        f"{moved:.0f} samples whose router has moved": moved > 0 and not may_move,
        f"{last.get('ledger/rejected', 0.0):.0f} samples rejected": bool(last.get("ledger/rejected", 0.0)),
    }
    return {
        "steps": len(trained),
        "updates": sum(row.get("optimizer/grad_norm") is not None for row in trained),
        "moved samples": moved,
        "oldest": max((row.get("rollout/age_max") or 0.0 for row in trained), default=math.nan),
        "flips mean": _mean(trained, "routing/local_flip_rate"),
        "flips worst": max((row.get("routing/local_flip_rate") or 0.0 for row in trained), default=math.nan),
        "engine k3": _mean(trained, "engine/k3_kl"),
        "quantization k3": _mean(trained, "probe/quantization_k3_kl"),
        "cast k3": _mean(trained, "probe/cast_k3_kl"),
        "arithmetic k3": _mean(trained, "probe/arithmetic_k3_kl"),
        "reward": _mean(trained[-20:], "reward/mean"),
        "verdict": "; ".join(fault for fault, holds in faults.items() if holds) or "holds",
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | str:
    """Mean of the steps that have it; a dash where none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else "-"


if __name__ == "__main__":
    sys.exit(main())
