"""`moe-trm eval RUN|CHECKPOINT`: how good the weights are, greedy and sampled, on held-out prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from launch.start.preflight import load_here
from moe_trm.config.engines import LEARNER, short_name
from moe_trm.runtime.private import Scratch
from moe_trm.tools.evaluate.measure import Evaluation, evaluate
from moe_trm.tools.evaluate.subject import answering, find_target, settings_of

NUM_SHOWN = 3
"""Answers that are printed; all of them are in the JSON."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm eval`."""
    parser.add_argument("weights", type=Path, help="run directory, one of its checkpoints, or a Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. task.reward=my_task.py:reward")
    parser.add_argument("--step", type=int, help="of a run: the weights after this step (default: the final ones)")
    parser.add_argument("--config", type=Path, help="what to ask, of a Hugging Face folder that belongs to no run")
    parser.add_argument("--prompts", type=Path, help="a JSONL or parquet file to ask instead, all of it")
    parser.add_argument("--samples", type=int, metavar="K", help="sampled answers to each prompt (eval.samples)")
    parser.add_argument(
        "--by",
        metavar="ENGINE",
        help=f"who answers: an engine's servers (default: the run's), or `{LEARNER}`: transformers, in learner.dtype",
    )
    parser.add_argument("--json", type=Path, help="file of the results (default: RUN/eval/WEIGHTS-BY.json)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the JSON. Raises `RunError`, `ConfigError`, `CheckpointError`, `EngineError`."""
    with Scratch() as scratch:
        target = find_target(args.weights, args.step, scratch)
        by = answering(target, args.config, args.by)
        path, overrides = settings_of(
            target, by=by, config=args.config, prompts=args.prompts, samples=args.samples, scratch=scratch
        )
        config, _ = load_here(str(path), [*overrides, *args.overrides])
        out = args.json or target.folder / f"{'' if target.run else 'eval-'}{target.name}-{short_name(by)}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        print(f"evaluating {target.weights if args.step is None else target.name} by {by}", flush=True)
        evaluation = evaluate(config, target.weights, by, scratch, out.with_suffix(".log"))
    print(table(evaluation))
    document = {
        "weights": str(args.weights),
        "checkpoint": target.name,
        "by": by,
        "dtype": evaluation.dtype,
        "task": config.task.model_dump(mode="json"),
        "metrics": dict(evaluation.metrics),
        "intervals_95": {name: list(interval) for name, interval in evaluation.intervals.items()},
        "answers": dict(evaluation.answers),
    }
    out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nresults: {out}")
    return 0


def table(evaluation: Evaluation) -> str:
    """The metrics, one to a line, and the first answers."""
    width = max(len(name) for name in evaluation.metrics)
    lines = []
    for name, value in evaluation.metrics.items():
        interval = evaluation.intervals.get(name)
        reach = f"  95% interval over prompts [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
        lines.append(f"{name:<{width}}  {value:10.4f}{reach}")
    for name, answers in evaluation.answers.items():
        lines.append(f"\nanswers{f' of {name}' if name else ''}, the first {min(NUM_SHOWN, len(answers))}:")
        for answer in answers[:NUM_SHOWN]:
            greedy = answer["greedy"]
            answer_text = greedy.get("text", f"(rejected: {greedy.get('rejected')})")
            lines.append(f"  {answer['prompt'][-60:]!r} -> {answer_text[:80]!r}  reward {greedy.get('reward', '-')}")
    return "\n".join(lines)
