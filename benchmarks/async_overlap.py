"""Time of a step when sampling overlaps training, compared with sampling and training in turn.

`python -m benchmarks.async_overlap [--steps N] [--json FILE]` makes a tiny checkpoint and a recording. The recording
delays its answers, so that sampling a batch takes as long as training on it. The real learner then trains on the
recording in each pipeline mode.

The bound is computed step by step. It is the longer of two times: the delay of the answers, and the step's own seconds
without waiting. Perfect overlap is 1.0 of the bound.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.options import command_line
from benchmarks.table import Row, report
from launch.job import run_job
from moe_trm.config.schema import Config
from moe_trm.recording.bundle import BundleWriter
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.tasks.build import build_task
from moe_trm.tasks.prompts import PromptOrder
from moe_trm.types import Prompt, RolloutRecord
from routing import RouteRecord, token_digest

GROUPS, GROUP_SIZE, CONCURRENCY, ANSWER_TOKENS = 8, 8, 8, 64
MODES = (("sync", 0), ("one_step", 1), ("async", 2))
SKIPPED = 3
"""First steps: nothing has been sampled ahead yet, and caches are cold."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=15,
        help=f"training steps of each run, the first {SKIPPED} not counted (default: 15)",
    )
    parser.add_argument(
        "--rollout-to-train", type=float, default=1.0, help="seconds of sampling per second of training (default: 1)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.steps, args.rollout_to_train)
    report("Seconds of a step, means; sampling is a recording at a pace, training is real", rows, args.json)
    return 0


def measure(folder: Path, steps: int, rollout_to_train: float) -> list[Row]:
    """One row per pipeline mode."""
    from moe_trm.models.tiny.checkpoint import make_checkpoint

    make_checkpoint(folder / "checkpoint")
    config = write_config(folder, steps)
    for eta in {eta for _, eta in MODES}:
        record_rollouts(config, folder / f"bundle-{eta}", steps, eta)
    calibration = run(folder, "calibration", "sync", 0, 0.0)[1 + SKIPPED :]
    rollout_s = rollout_to_train * statistics.median(row["time/step_s"] - row["time/wait_s"] for row in calibration)
    delay_s = rollout_s * CONCURRENCY / (GROUPS * GROUP_SIZE)
    return [
        {"mode": mode, "max_staleness": eta, **summary(run(folder, f"{mode}-{eta}", mode, eta, delay_s), rollout_s)}
        for mode, eta in MODES
    ]


def summary(metrics: Sequence[Mapping[str, float]], rollout_s: float) -> dict[str, float]:
    """Means over the counted steps of one run.

    The bound of each step is the longer of sampling and of that very step's training: on a machine that others use,
    both drift.
    """
    counted = metrics[1 + SKIPPED :]
    train_s = [row["time/step_s"] - row["time/wait_s"] for row in counted]
    step_s = statistics.fmean(row["time/step_s"] for row in counted)
    bound_s = statistics.fmean(max(rollout_s, seconds) for seconds in train_s)
    return {
        "step_s": step_s,
        "wait_s": statistics.fmean(row["time/wait_s"] for row in counted),
        "train_s": statistics.fmean(train_s),
        "rollout_s": rollout_s,
        "bound_s": bound_s,
        "step / bound": step_s / bound_s,
        "age": statistics.fmean(row["rollout/age_mean"] for row in counted),
    }


def run(folder: Path, name: str, mode: str, eta: int, delay_s: float) -> list[dict[str, float]]:
    """Metrics of one run."""
    overrides = [f"name={name}", f"pipeline.mode={mode}", f"rollout.bundle={folder / f'bundle-{eta}'}"]
    overrides += [f"rollout.bundle_delay_s={delay_s}", *([f"pipeline.max_staleness={eta}"] if mode == "async" else [])]
    if run_job(str(folder / "config.yaml"), overrides) != 0:
        raise SystemExit(f"run {name} failed; see above")
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def write_config(folder: Path, steps: int) -> Config:
    settings = {
        "run_dir": str(folder / "runs"),
        "model": {"checkpoint": str(folder / "checkpoint")},
        "task": {"eval_size": 0},
        "rollout": {
            "engine": "bundle",
            "bundle": str(folder / "bundle-0"),
            "prompts_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "concurrency": CONCURRENCY,
            "max_new_tokens": ANSWER_TOKENS,
        },
        "sampling_mask": {"mode": "off"},
        # Made-up routes: replayed like any others, but unlike the router's own.
        "replay": {"mode": "R3", "max_local_flip_rate": 1.0},
        "probe": {"every": 0},
        "learner": {"minibatches": 2, "micro_batch_rows": 16},
        "train": {"steps": steps, "export": False},
        "observe": {"report": False, "transcripts": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return Config.model_validate(settings)


def record_rollouts(config: Config, folder: Path, steps: int, eta: int) -> None:
    """A recording with made-up answers, each step sampled `eta` versions before it is trained."""
    task = build_task(config.task, config.model.checkpoint, config.seed)
    prompts, model = PromptOrder(task, GROUPS), ServedModel.from_checkpoint(Path(config.model.checkpoint))
    writer, rng = BundleWriter(str(folder)), np.random.default_rng(0)
    for step in range(1, steps + 1):
        groups = range((step - 1) * GROUPS, step * GROUPS)
        numbers = [(group * GROUP_SIZE + place, group) for group in groups for place in range(GROUP_SIZE)]
        version = max(0, step - 1 - eta)
        writer.write(step, [made_up(rng, model, prompts(group), number, group, version) for number, group in numbers])


def made_up(
    rng: np.random.Generator, model: ServedModel, prompt: Prompt, sample_id: int, group_id: int, version: int
) -> RolloutRecord:
    answer = rng.integers(4, model.vocab_size, ANSWER_TOKENS)
    tokens = np.concatenate([prompt.token_ids, answer]).astype(np.int32)
    shape = (len(tokens) - 1, len(model.moe_layer_ids), model.num_experts)
    experts = np.argsort(rng.random(shape), axis=-1)[..., : model.top_k].astype(np.uint8)
    logprobs = np.full(ANSWER_TOKENS, -np.log(model.vocab_size), np.float32)
    return RolloutRecord(
        sample_id=sample_id,
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt.token_ids),
        turn_ids=np.zeros(len(tokens), np.int16),
        rollout_logprobs=logprobs,
        full_logprobs=logprobs,
        versions=np.full(ANSWER_TOKENS, version, np.int32),
        routes=RouteRecord(experts, model.moe_layer_ids, model.num_experts, token_digest(tokens)),
        sampling_mask=None,
        finish_reason="length",
    )


if __name__ == "__main__":
    sys.exit(main())
