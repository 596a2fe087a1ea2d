"""Our step beside TRL's: the same start, the same prompts, 128 answers and two updates, in turn on one machine.

A step of either lasts from the end of the one before to its own end. Nothing that a run does between two steps is left
out.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.table import Row
from moe_trm.config.schema import Config
from moe_trm.tasks.build import build_task

CONFIG = Path("configs/quickstart.yaml")
SKIPPED = 3
"""Steps at the beginning that warm up; the next one counts from the end of the last of these."""
OURS: Mapping[str, tuple[str, ...]] = {
    "with the probe": ("probe.every=2",),
    "without it": ("probe.every=0",),
}


def pairs(checkpoint: str, folder: Path, python: str, rounds: int, steps: int) -> Iterator[Row]:
    """One row for each of our settings: medians of both, and the ratio of neighbouring runs.

    Args:
        checkpoint: the quickstart's start.
        folder: for the runs.
        python: an interpreter with `trl`.
        rounds: runs of each.
        steps: of a run; the first few are not counted.
    """
    problems = folder / "problems.jsonl"
    problems.write_text("".join(_problems(checkpoint, steps)), encoding="utf-8")
    seconds: dict[str, list[float]] = {name: [] for name in ("trl", *OURS)}
    versions: Mapping[str, str] = {}
    for number in range(rounds):
        script = str(Path(__file__).with_name("trl_steps.py"))
        answer = _run([python, script, checkpoint, str(problems), str(steps)]).splitlines()[-1]
        found = json.loads(answer)
        versions = found["versions"]
        seconds["trl"].append(typical(found["seconds"][SKIPPED - 1 :]))
        for name, overrides in OURS.items():
            seconds[name].append(_ours(checkpoint, folder / f"{name}-{number}", steps, overrides))
    for name in OURS:
        ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds["trl"], strict=True)]
        yield {
            "ours": name,
            "seconds": statistics.median(seconds[name]),
            f"trl {versions['trl']}": statistics.median(seconds["trl"]),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "pairs": rounds,
        }


def typical(seconds: Sequence[float]) -> float:
    """Median of the means of two neighbouring steps, of which one has a probe where there are any."""
    return statistics.median(map(statistics.fmean, itertools.pairwise(seconds)))


def between_ends(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds from the end of each step to that of the next. `rows`: of a run's metrics, in order."""
    ends = [float(row["time/unix_s"]) for row in rows if "time/step_s" in row]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _problems(checkpoint: str, steps: int) -> Iterator[str]:
    config = Config.model_validate({"model": {"checkpoint": checkpoint}})
    task = build_task(config.task, checkpoint, config.seed)
    for prompt in itertools.chain.from_iterable(task.train_prompts(step, 16) for step in range(1, steps + 1)):
        row = {"prompt": prompt.text, "answer": prompt.answer, "token_ids": list(prompt.token_ids)}
        yield json.dumps(row) + "\n"


def _ours(checkpoint: str, folder: Path, steps: int, overrides: tuple[str, ...]) -> float:
    """Typical seconds of a step of a run of the quickstart's settings."""
    settings = (f"model.checkpoint={checkpoint}", f"train.steps={steps}", "task.eval_size=0", "train.export=false")
    place = (f"run_dir={folder.parent}", f"name={folder.name}")
    _run([sys.executable, "-m", "moe_trm", "train", str(CONFIG), *settings, *place, *overrides])
    rows: list[dict[str, Any]] = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return typical(between_ends(rows)[SKIPPED - 1 :])


def _run(command: list[str]) -> str:
    """Standard output. Raises `SystemExit` with the last words of a command that failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
