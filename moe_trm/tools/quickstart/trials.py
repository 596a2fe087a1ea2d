"""Trials of the quickstart: the start that they share, each run with what it must reach, and the result in words."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from launch.job import run_job
from moe_trm.errors import MoeTrmError
from moe_trm.models.tiny.checkpoint import TinyShape
from moe_trm.runtime.lifeline import end_with_parent
from moe_trm.tools.quickstart import warmup
from moe_trm.tools.quickstart.options import BACKENDS
from moe_trm.tools.quickstart.plot import draw
from moe_trm.tools.quickstart.summary import pooled_mismatch, print_mismatch, read_metrics

NUM_RANKS = 2
BEFORE_AT_MOST, AFTER_AT_LEAST, GAIN_AT_LEAST = 0.30, 0.70, 0.40


@dataclass(frozen=True)
class Trial:
    """One RL run: how it differs from the quickstart configuration, and which gain in accuracy it must stay in."""

    name: str
    overrides: tuple[str, ...]
    gain_at_least: float
    gain_below: float


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    before: float
    after: float
    seconds: float
    optimizer_steps: int

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def passed(self) -> bool:
        learns = self.trial.gain_at_least > 0
        levels = not learns or (self.before <= BEFORE_AT_MOST and self.after >= AFTER_AT_LEAST)
        return levels and self.trial.gain_at_least <= self.gain < self.trial.gain_below


def run_trials(args: argparse.Namespace) -> int:
    """The trials of the command's options, one after the other, and their report; its exit status."""
    extra = [*BACKENDS[args.backend], *args.overrides]
    try:
        checkpoint = prepare_checkpoint(args.run_dir / "quickstart-start")
        planned = trials(args.seeds, args.controls, args.backend)
        outcomes = [run_trial(trial, args.config, checkpoint, args.run_dir, extra) for trial in planned]
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return report(outcomes, args.run_dir)


def trials(seeds: Sequence[int], controls: bool, backend: str = "megatron") -> list[Trial]:
    """The runs that must learn, one per seed, and the controls that must not."""
    prefix = "quickstart" if backend == "megatron" else f"quickstart-{backend}"
    learning = [Trial(f"{prefix}-seed{seed}", (f"seed={seed}",), GAIN_AT_LEAST, 2.0) for seed in seeds]
    if not controls:
        return learning
    return [
        *learning,
        Trial("control-lr0", ("optimizer.lr=0.0",), -2.0, 0.03),
        Trial("control-shuffled-rewards", ("task.shuffle_rewards=true",), -2.0, 0.10),
    ]


def prepare_checkpoint(folder: Path) -> Path:
    """Make and warm up the starting model once; later runs reuse it."""
    if (folder / "warmup.json").exists():
        print(f"starting from the warmed-up model in {folder} (delete the folder to make it anew)", flush=True)
        return folder
    print(
        "warming up a tiny Qwen3-MoE by supervised steps: first sums with working, then mostly bare answers", flush=True
    )
    # A fork: everything that it needs is imported.
    process = get_context("fork").Process(target=_warm_up, args=(folder,))
    process.start()
    process.join()
    if process.exitcode:
        raise MoeTrmError("the warm-up failed", where=str(folder), fix="Its own message above says why.")
    return folder


def _warm_up(folder: Path) -> None:
    end_with_parent()
    sys.exit(warmup.main(["--out", str(folder)]))


def run_trial(trial: Trial, config: str, checkpoint: Path, run_dir: Path, extra: Sequence[str]) -> Outcome:
    """One RL run on the real engines; its run directory keeps everything it measured."""
    print(f"\n== {trial.name}", flush=True)
    started = time.perf_counter()
    overrides = [f"model.checkpoint={checkpoint}", f"name={trial.name}", f"run_dir={run_dir}", "rollout.server.port=0"]
    # A second quickstart shows training again, not that it is done already.
    overrides += ["checkpoint.resume=never", *extra, *trial.overrides]
    code = run_job(config, overrides, NUM_RANKS)
    if code:
        raise MoeTrmError(f"the run {trial.name} ended with exit code {code}", where=str(run_dir / trial.name))
    rows = read_metrics(run_dir / trial.name)
    evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    steps = int(sum(row.get("optimizer/steps", 0) for row in rows))
    return Outcome(trial, evaluated[0], evaluated[-1], time.perf_counter() - started, steps)


def report(outcomes: Sequence[Outcome], run_dir: Path) -> int:
    """Print the result in plain words. Returns 0 only when every run did what it should."""
    print(
        "\nGreedy accuracy on 256 held-out sums, before and after RL. The warmed-up model can do sums step by step, "
        "but mostly"
    )
    print("blurts an answer; what RL teaches it is to show its working.\n")
    print(f"{'run':<28}{'before':>8}{'after':>8}{'gain':>8}{'optimizer steps':>17}{'seconds':>9}   verdict")
    for outcome in outcomes:
        verdict = "as expected" if outcome.passed else "NOT as expected"
        print(
            f"{outcome.trial.name:<28}{outcome.before:>8.3f}{outcome.after:>8.3f}{outcome.gain:>+8.3f}"
            f"{outcome.optimizer_steps:>17}{outcome.seconds:>9.0f}   {verdict}"
        )
    learned = [run_dir / outcome.trial.name for outcome in outcomes if outcome.trial.gain_at_least > 0]
    mismatch = pooled_mismatch(learned, num_layers=TinyShape().layers)
    print_mismatch(mismatch)
    picture = run_dir / "quickstart.svg"
    picture.write_text(draw({run.name: read_metrics(run) for run in learned}, mismatch), encoding="utf-8")
    results = [
        {"run": o.trial.name, "before": o.before, "after": o.after, "seconds": o.seconds, "passed": o.passed}
        for o in outcomes
    ]
    figures = [{"figure": name, **asdict(interval)} for name, interval in mismatch.items()]
    (run_dir / "quickstart.json").write_text(json.dumps({"rows": [*results, *figures]}, indent=2) + "\n")
    print(f"\npicture: {picture}")
    print(f"run directories: {', '.join(str(run_dir / o.trial.name) for o in outcomes)}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1
